"""Offline inference: generate from Python in this process, without a cluster.

    from alignedserve import LLM, SamplingParams
    LLM("pocket").chat(["spell otter"])[0].text

The logic and the engine are those of a colocated worker behind the gateway; only the links are missing.
"""

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from msgspec import structs

from alignedserve.api.embeddings.response_format import Vectors
from alignedserve.api.errors import named
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.openai.request_builder import PreparedChat, choice_seed
from alignedserve.config.sections import (
    DecodeWorkerConfig,
    EngineConfig,
    ModelSectionConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.core.errors import ContextTooLong, InvalidRequest, ModelError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter, Request
from alignedserve.messages.events import PeerConnected, Received, Send, SendTo
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.workers import AttemptFailed, PrefillRequest, WorkerRegistered
from alignedserve.offline.answers import CollectedAnswer, ProgressLine, RequestOutput, collect
from alignedserve.offline.calling_process import HeldInterrupt, let_forks_compute, require_loops
from alignedserve.offline.conversations import Conversation, ConversationOptions, ConversationReader, conversations_of
from alignedserve.offline.sampling import ANY_FOLDER, LoRARequests, SamplingParams, Samplings, adapters_of, samplings_of
from alignedserve.offline.text_reader import EmbedOptions, OnError, PromptErrors, TextReader, encoded_prompts, listed
from alignedserve.prefix_cache.block_hashes import prefix_root
from alignedserve.runtime.device.cores import has_native_bfloat16
from alignedserve.runtime.device.devices import check_ranks, worker_devices
from alignedserve.runtime.device_check.choice import choose_device
from alignedserve.runtime.engine.engine_sizes import EngineSizes, jumps_ahead
from alignedserve.runtime.executor import Executor, make_executor
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of, serialize_alone
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.served_model import load_tokenizer, resolve_model
from alignedserve.worker_core.factory import make_colocated_logic, memory_of
from alignedserve.worker_core.part import WorkerCommand
from kernels.float8_linear import has_float8_products

logger = logging.getLogger(__name__)

_MAX_TOKENS = 2048
_ROUTER = "caller"
_CONTINUED = OutputFormat(is_continued=True)  # a prompt's text goes on

let_forks_compute()  # before this process computes, whether with a model or by itself


class LLM:
    """A model ready to generate. `memory_bytes` bounds the KV cache; requests beyond it wait.

    Threads may share it: calls are computed in turn. Processes forked from its own may not; on CPUs
    they may make another. `with LLM(...) as llm` closes it.
    Raises ModelError, ConfigError or NotEnoughMemory when made.
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        window_cache: str = "auto",
        max_running: int = 64,
        memory_bytes: int = 256 * 2**20,
        device: str = "auto",
        prefix_cache: bool = True,
        chat_template: str | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        enable_lora: bool = False,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
    ) -> None:
        """Load the model onto `device`; this, `kv_cache_dtype` and `window_cache` are given like those of engine.

        `prefix_cache`: prompts that begin like earlier ones are computed from where they differ. The next three are
        like those of model: a file with a template, the name of a format (docs/tools.md). `enable_lora`: prompts may
        have adapters, for which memory is kept. `tensor_parallel_size`: so many processes compute the model together
        (docs/tensor-parallelism.md); `pipeline_parallel_size`: one after another (docs/pipeline-parallelism.md);
        `expert_parallel_size`: so many share its experts (docs/tensor-parallelism.md).
        """
        require_loops()
        engine = EngineConfig(
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            window_cache=window_cache,
            tensor_parallel=tensor_parallel_size,
            pipeline_parallel=pipeline_parallel_size,
            expert_parallel=expert_parallel_size,
        )
        choice = choose_device(engine.device)
        choice.log()
        (worker_device,) = worker_devices(choice.device, 1)
        section = with_local_model(
            ModelSectionConfig(
                path=model,
                dtype=dtype,
                quantization=quantization,
                chat_template=chat_template,
                tool_format=tool_format,
                reasoning_format=reasoning_format,
            )
        )
        served = resolve_model(
            section,
            structs.replace(engine, device=worker_device),
            has_bfloat16=has_native_bfloat16(),
            has_float8=has_float8_products(worker_device),
            states_apart=True,
        )
        check_ranks(worker_device, tensor_parallel_size, pipeline_parallel_size, expert_parallel_size)
        if served.stored is not None and served.stored.warning is not None:
            logger.warning("Weights: %s.", served.stored.warning)
        self._served = served = replace(served, lora=ANY_FOLDER if enable_lora else served.lora)
        self._tokenizer = load_tokenizer(served)
        self._max_context_len, self._encoder = served.max_context_len, served.encoder
        prefix_cache = prefix_cache and served.encoder is None  # whose tokens depend on those after them
        jumps = jumps_ahead(engine.jump_ahead, worker_device)
        sizes = EngineSizes(
            memory_bytes, max_running, served.default_block_size, device=worker_device, jumps_ahead=jumps
        )
        self._executor = make_executor(served, sizes)
        self._end = weakref.finalize(self, _end, self._executor, os.getpid())  # of a process that calls no `close`
        self._conversations = ConversationReader(ModelCard.of(served), self._tokenizer, self._executor.check_grammar)
        registered = WorkerRegistered(
            num_blocks=self._executor.num_blocks,
            block_size=self._executor.layout.block_size,
            max_running_requests=max_running,
            pool_name="",
            can_prefill=True,
            can_decode=True,
        )
        config = DecodeWorkerConfig(
            max_running_requests=max_running, max_num_batched_tokens=_MAX_TOKENS, swap_space_bytes=0
        )
        self._logic = make_colocated_logic(
            registered=registered,
            memory=memory_of(config, self._executor.layout, num_blocks=self._executor.num_blocks),
            config=config,
            scheduling=SchedulingConfig(policy="fcfs"),
            eos_token_ids=self._executor.eos_token_ids,
            prefix_cache=PrefixCacheConfig(enabled=prefix_cache),
            has_states=self._executor.layout.state_bytes > 0,
        )
        # Of one model, for one user.
        self._root = prefix_root(b"", tenant="", salt="", form=b"") if prefix_cache else b""
        self._turn, self._pid = threading.Lock(), os.getpid()
        self._is_closed = False
        self._is_broken = False  # a call broke off: the logic may keep its requests, or know no end of its iteration
        width = served.encoder.vector_width if served.encoder is not None else served.decoder.hidden_size
        self._texts = TextReader(self._tokenizer, served.max_context_len, served.encoder, width, self._root)
        self._perform([PeerConnected(Role.ROUTER, _ROUTER)], {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        sampling: Samplings = None,
        *,
        structured_outputs: StructuredOutputs | None = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = True,
        errors: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continue every prompt, a text or its token ids, and return one output per prompt, in order.

        One text may stand for a list of it. Token ids are taken as they are: no begin token comes before them. Without
        `sampling`: greedily, for as long as context and `memory_bytes` allow. `structured_outputs`: what every output
        must match. `sampling` and `lora_request` are for all prompts, or a list with one for each. `use_tqdm`: show how
        far this is on a terminal. Raises AdapterError, ContextTooLong, InvalidRequest for a prompt that is none, one
        that needs more cache than there is or a constraint that is not supported, ModelError where the model cannot
        answer one. `errors="return"`: an error of a prompt is the `error` of its output instead.
        """
        all_prompts = listed(prompts)
        of_prompts = PromptErrors(len(all_prompts), errors)
        grammar = self._grammar_of(structured_outputs) if structured_outputs is not None else ""
        encoded = encoded_prompts(all_prompts, self._tokenizer, of_prompts)
        chats = {index: PreparedChat(tuple(prompt), _CONTINUED, grammar) for index, prompt in encoded.items()}
        return self._answer(chats, sampling, lora_request, of_prompts, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Samplings = None,
        *,
        structured_outputs: StructuredOutputs | None = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = True,
        errors: OnError = "raise",
        **options: Unpack[ConversationOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, and return one output for each, in order.

        A conversation is a list of messages in OpenAI's shape, or a text: the first message of its user. The answers
        are those of the gateway: thoughts and calls of tools stand apart from the text, calls are decoded under their
        schemas, and `output.message` is what to append before the next turn. Raises like `generate`, or returns.
        """
        conversations = conversations_of(messages)
        of_prompts = PromptErrors(len(conversations), errors)
        chats = self._conversations.prepare(conversations, structured_outputs, options, of_prompts)
        return self._answer(chats, sampling, lora_request, of_prompts, use_tqdm=use_tqdm)

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        use_tqdm: bool = True,
        errors: OnError = "raise",
        **options: Unpack[EmbedOptions],
    ) -> Vectors:
        """Return a vector of length 1 for every text, or for the one, float32 [texts, width].

        Raises ContextTooLong, InvalidRequest, GenerationFailed. `errors="return"`: the vector of a text with an error
        is NaN, and a warning says why.
        """
        listed_texts = listed(texts)
        of_texts = PromptErrors(len(listed_texts), errors)
        vectors = self._texts.embed(listed_texts, options, partial(self._generate, use_tqdm=use_tqdm), of_texts)
        for index, error in sorted(of_texts.by_index.items())[:1]:
            count = len(of_texts.by_index)
            logger.warning("%d of %d texts have no vector; texts[%d]: %s", count, of_texts.count, index, error)
        return vectors

    def score(
        self,
        text_1: str | Iterable[str],
        text_2: str | Iterable[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        errors: OnError = "raise",
    ) -> list[float]:
        """Return the score of each pair: a cross-encoder's, or the cosine of the texts' vectors.

        `text_1`: one text for all of `text_2`, or as many. Raises like `embed`, or returns NaN for a pair.
        """
        compute = partial(self._generate, use_tqdm=use_tqdm)
        return self._texts.score(listed(text_1), listed(text_2), truncate_prompt_tokens, compute, errors)

    def close(self) -> None:
        """End the engine's threads and processes; `with LLM(...) as llm` does it at its end. No call may follow."""
        with self._turn:
            self._is_closed = True
            self._end()

    def _grammar_of(self, outputs: StructuredOutputs) -> str:
        try:
            grammar = serialize_alone(part_of(outputs))
            self._executor.check_grammar(grammar)
        except InvalidRequest as error:
            raise named(f"structured_outputs.{outputs.kind}", error) from error
        return grammar

    def _answer(
        self,
        chats: Mapping[int, PreparedChat],
        sampling: Samplings,
        lora_request: LoRARequests,
        errors: PromptErrors,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        samplings = samplings_of(sampling, errors.count)
        adapters = adapters_of(lora_request, errors.count, self._served)
        of_prompts: dict[int, list[CollectedAnswer]] = {}
        for index, chat in chats.items():
            with errors.of(index):
                of_prompts[index] = self._answers(chat, samplings[index], adapters[index])
        self._compute(of_prompts, errors, use_tqdm=use_tqdm)
        outputs = [RequestOutput(error=errors.by_index.get(index)) for index in range(errors.count)]
        for index, (first, *others) in of_prompts.items():
            if index not in errors.by_index:
                first.output.others = [other.output for other in others]
                outputs[index] = first.output
        return outputs

    def _answers(
        self, prompt: PreparedChat, sampling: SamplingParams | None, adapter: LoraAdapter | None
    ) -> list[CollectedAnswer]:
        stops, count = (sampling.stop_strings, sampling.n) if sampling is not None else ((), 1)
        seed = secrets.randbits(63) if sampling is None or sampling.seed is None else sampling.seed
        shared = self._request(prompt.prompt, sampling, prompt.grammar, adapter)
        answers = []
        for choice in range(count):
            sampled = replace(shared.sampling, seed=choice_seed(seed, choice))
            request = replace(shared, request_id=RequestId(secrets.token_hex(8)), sampling=sampled)
            make_decoder = partial(self._conversations.decoder, request, prompt.output_format, stops)
            answers.append(CollectedAnswer(request, make_decoder, has_stops=bool(stops)))
        return answers

    def _generate(
        self, requests: Mapping[int, Request], errors: PromptErrors, *, use_tqdm: bool
    ) -> dict[int, RequestOutput]:
        answers = {index: [CollectedAnswer(request)] for index, request in requests.items()}
        self._compute(answers, errors, use_tqdm=use_tqdm)
        return {index: answer.output for index, (answer,) in answers.items() if index not in errors.by_index}

    def _compute(
        self, of_prompts: Mapping[int, Sequence[CollectedAnswer]], errors: PromptErrors, *, use_tqdm: bool
    ) -> None:
        if os.getpid() != self._pid:  # the engine's threads were not forked
            raise ModelError("this LLM is of the process that this one was forked from; spawn processes instead")
        answers = [answer for prompt in of_prompts.values() for answer in prompt]
        by_id = {answer.request.request_id: answer for answer in answers}
        received = [Received(_ROUTER, PrefillRequest(answer.request, number)) for number, answer in enumerate(answers)]
        with self._turn:
            if self._is_closed:
                raise ModelError("this LLM is closed; make another")
            if self._is_broken:
                raise ModelError("an earlier call broke off; make another LLM")
            with ProgressLine(len(answers), is_shown=use_tqdm) as progress:
                reasons = self._perform(received, by_id, progress)
        ids = {answer.request.request_id: index for index, prompt in of_prompts.items() for answer in prompt}
        errors.fail({ids[request_id]: reason for request_id, reason in reasons.items()})

    def _request(
        self, prompt: Sequence[int], sampling: SamplingParams | None, grammar: str, adapter: LoraAdapter | None
    ) -> Request:
        if self._encoder is not None:
            raise InvalidRequest("This model is an encoder: it writes no text; use embed or score.", param="prompts")
        max_tokens = self._max_context_len - len(prompt)
        if max_tokens < 1:
            raise ContextTooLong(f"the prompt has {len(prompt)} tokens, the model's context {self._max_context_len}")
        layout, num_blocks = self._executor.layout, self._executor.num_blocks
        cached = (num_blocks - layout.state_blocks) * layout.block_size - len(prompt)
        wanted = (sampling or SamplingParams(max_tokens=max(cached, 1), temperature=0.0)).for_worker()
        if grammar and wanted.grammar:
            raise InvalidRequest("sampling has a grammar, and the options ask for another", param="grammar")
        wanted = replace(
            wanted,
            max_tokens=min(wanted.max_tokens, max_tokens),
            grammar=grammar or wanted.grammar,
        )
        if layout.blocks_for(len(prompt) + wanted.max_tokens) > num_blocks:
            raise InvalidRequest("the request needs more KV cache than memory_bytes allows", param="max_tokens")
        try:
            self._executor.check_grammar(wanted.grammar)
        except InvalidRequest as error:
            raise named("grammar", error) from error
        request_id = RequestId(secrets.token_hex(8))
        root = self._root
        if adapter is not None and root:
            root = prefix_root(b"", tenant="", salt="", form=adapter.digest)
        return Request(request_id, tuple(prompt), wanted, "", 0.0, prefix_root=root, adapter=adapter)

    def _perform(
        self,
        events: Sequence[PeerConnected | Received],
        answers: dict[RequestId, CollectedAnswer],
        progress: ProgressLine | None = None,
    ) -> dict[RequestId, str]:
        """Perform what follows from `events` until nothing is left; return why requests have failed. Other messages to
        the router are dropped. Ctrl-C aborts all requests after the iteration in hand."""
        pending: list[WorkerCommand] = []
        reasons: dict[RequestId, str] = {}
        unanswered = list(answers)
        with HeldInterrupt() as interrupt:
            self._is_broken = True
            for event in events:
                pending += self._logic.on_event(event, 0.0)
            while pending:
                if interrupt.came and unanswered:
                    pending += self._abort(unanswered)
                    unanswered = []
                command = pending.pop(0)
                if isinstance(command, RunIteration):
                    completed: IterationCompleted = self._executor.run_iteration(command)
                    pending += self._logic.on_event(completed, 0.0)
                elif isinstance(command, SendTo):
                    pending += self._abort(collect(command.message, answers, progress))
                elif isinstance(command, Send) and isinstance(command.message, AttemptFailed):
                    reasons[command.message.request_id] = command.message.reason
            self._is_broken = False
        return reasons

    def _abort(self, request_ids: Sequence[RequestId]) -> list[WorkerCommand]:
        events = [Received(_ROUTER, AbortRequest(request_id)) for request_id in request_ids]
        return [command for event in events for command in self._logic.on_event(event, 0.0)]


def _end(executor: Executor, pid: int) -> None:
    if os.getpid() == pid:  # a fork has the executor of its parent
        executor.close()

"""Offline inference: generate from Python in this process, without a cluster.

    from alignedserve import LLM, SamplingParams
    LLM("pocket").chat(["spell otter"])[0].text

The logic and the engine are those of a colocated worker behind the gateway; only the links are missing.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from alignedserve.config.sections import (
    DecodeWorkerConfig,
    EngineConfig,
    ModelSectionConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, SamplingParams
from alignedserve.messages.events import PeerConnected, Received, SendTo
from alignedserve.messages.gateways import TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.workers import PrefillRequest, WorkerRegistered
from alignedserve.prefix_cache.block_hashes import prefix_root
from alignedserve.runtime.device.devices import worker_devices
from alignedserve.runtime.device.dtypes import has_native_bfloat16
from alignedserve.runtime.engine.model_executor import EngineSizes, ModelExecutor
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of
from alignedserve.runtime.grammar.lark import serialize_alone
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import load_tokenizer, resolve_model
from decode_worker.colocated.logic import ColocatedCommand
from decode_worker.factory import make_colocated_logic, memory_of
from kernels.float8_linear import has_float8_products

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_MAX_TOKENS = 2048
_ROUTER = "caller"


@dataclass(slots=True)
class RequestOutput:
    """The text generated for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt, that were not computed again


class LLM:
    """A model ready to generate. `memory_bytes` bounds the KV cache; requests beyond it wait.

    Raises ModelError, ConfigError or NotEnoughMemory when made.
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_running: int = 64,
        memory_bytes: int = 256 * 2**20,
        device: str = "auto",
        prefix_cache: bool = True,
    ) -> None:
        """Load the model onto `device`; this and `kv_cache_dtype` are given like those of engine.

        `prefix_cache`: prompts that begin like earlier ones are computed from where they differ.
        """
        engine = EngineConfig(device=device, kv_cache_dtype=kv_cache_dtype)
        (worker_device,) = worker_devices(engine.device, 1)
        section = with_local_model(ModelSectionConfig(path=model, dtype=dtype, quantization=quantization))
        served = resolve_model(
            section,
            worker_device,
            engine.kv_cache_dtype,
            has_bfloat16=has_native_bfloat16(),
            has_float8=has_float8_products(worker_device),
        )
        if served.stored is not None and served.stored.warning is not None:
            logger.warning("Weights: %s.", served.stored.warning)
        self._tokenizer = load_tokenizer(served)
        self._max_context_len = served.max_context_len
        self._executor = ModelExecutor(
            served, EngineSizes(memory_bytes, max_running, _BLOCK_SIZE, device=worker_device)
        )
        registered = WorkerRegistered(
            num_blocks=self._executor.num_blocks,
            block_size=_BLOCK_SIZE,
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
        )
        self._root = prefix_root(b"", tenant="", salt="", form=b"")  # of one model, for one user
        self._perform(self._logic.on_event(PeerConnected(Role.ROUTER, _ROUTER), 0.0), {})

    def generate(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        structured_outputs: StructuredOutputs | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt and return one output per prompt, in order.

        Without `sampling`: greedily, for as long as context and `memory_bytes` allow. `structured_outputs`: what every
        output must match. Raises ContextTooLong, InvalidRequest for one that needs more cache than there is or a
        constraint that is not supported.
        """
        return self._run([self._tokenizer.encode(prompt) for prompt in prompts], sampling, structured_outputs)

    def chat(
        self,
        messages: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        structured_outputs: StructuredOutputs | None = None,
    ) -> list[RequestOutput]:
        """Answer every message as the first of a conversation. Raises like `generate`."""
        now = datetime.now().astimezone()
        prompts = [self._tokenizer.encode_chat([{"role": "user", "content": text}], now=now) for text in messages]
        return self._run(prompts, sampling, structured_outputs)

    def close(self) -> None:
        """End the engine's threads."""
        self._executor.close()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> list[RequestOutput]:
        requests = [self._request(prompt, sampling) for prompt in prompts]
        if structured_outputs is not None:
            grammar = serialize_alone(part_of(structured_outputs))
            self._executor.check_grammar(grammar)
            requests = [replace(one, sampling=replace(one.sampling, grammar=grammar)) for one in requests]
        outputs = {request.request_id: RequestOutput() for request in requests}
        commands: list[ColocatedCommand] = []
        for number, request in enumerate(requests):
            commands += self._logic.on_event(Received(_ROUTER, PrefillRequest(request, number)), 0.0)
        self._perform(commands, outputs)
        for output in outputs.values():
            output.text = self._tokenizer.decode(output.token_ids)
        return list(outputs.values())

    def _request(self, prompt: Sequence[int], sampling: SamplingParams | None) -> Request:
        max_tokens = self._max_context_len - len(prompt)
        if max_tokens < 1:
            raise ContextTooLong(f"the prompt has {len(prompt)} tokens, the model's context {self._max_context_len}")
        cached = self._executor.num_blocks * _BLOCK_SIZE - len(prompt)
        wanted = sampling or SamplingParams(max_tokens=max(cached, 1), temperature=0.0)
        wanted = replace(wanted, max_tokens=min(wanted.max_tokens, max_tokens))
        if blocks_for(len(prompt) + wanted.max_tokens, _BLOCK_SIZE) > self._executor.num_blocks:
            raise InvalidRequest("the request needs more KV cache than memory_bytes allows", param="max_tokens")
        self._executor.check_grammar(wanted.grammar)
        request_id = RequestId(secrets.token_hex(8))
        return Request(request_id, tuple(prompt), wanted, reply_to="", arrival_s=0.0, prefix_root=self._root)

    def _perform(self, commands: Sequence[ColocatedCommand], outputs: dict[RequestId, RequestOutput]) -> None:
        """Perform commands until none is left. Messages to the router are dropped."""
        pending = list(commands)
        while pending:
            command = pending.pop(0)
            if isinstance(command, RunIteration):
                completed: IterationCompleted = self._executor.run_iteration(command)
                pending += self._logic.on_event(completed, 0.0)
            elif isinstance(command, SendTo) and isinstance(command.message, TokensEmitted):
                _collect(command.message, outputs)


def _collect(message: TokensEmitted, outputs: dict[RequestId, RequestOutput]) -> None:
    for delta in message.deltas:
        output = outputs[delta.request_id]
        output.token_ids += delta.token_ids
        output.finish_reason = delta.finish_reason or output.finish_reason
        output.num_cached_tokens += delta.num_cached_tokens

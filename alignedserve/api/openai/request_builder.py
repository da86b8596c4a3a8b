"""Builds the requests that the cluster serves from a checked body, for routes and for lines of batches."""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from alignedserve.api.conversation import AnswerSpec, Constraint, Conversation
from alignedserve.api.models.model_card import ChatModel
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.chat_grammar import answer_grammar, chat_grammar
from alignedserve.api.openai.chat_prompt import chat_output_format, note_effort
from alignedserve.api.openai.generation_request import Arrival, CallTerms, GenerationRequest, trial_turn
from alignedserve.api.openai.output_parser import OutputFormat, TextOptions
from alignedserve.api.openai.prompt_encoding import Prompt, Prompts, check_token_ids, encode_chat, param_at
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import rough_length
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.keep_alive import parse_keep_alive
from alignedserve.core.request import Request, SamplingParams
from alignedserve.runtime.grammar.compiler import with_free_blanks
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn
from alignedserve.text.tokenizer import Tokenizer

NumberT = TypeVar("NumberT", int, float)
_TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)


class PreparedChat(NamedTuple):
    """A conversation as the model gets it, and how its answer is decoded and read."""

    prompt: tuple[int, ...]
    output_format: OutputFormat
    grammar: str  # what the answer is decoded under; empty: anything


async def prepare_chat(
    conversation: Conversation,
    constraint: Constraint | None,
    prompt: tuple[int, ...],
    model: ChatModel,
    turn: TrialTurn = ALONE,
    ignored: IgnoredFields | None = None,
) -> PreparedChat:
    """Return an encoded conversation with the form and the grammar of its answer. Raises InvalidRequest.

    `ignored`: gets what tools' schemas say that calls are not held to; None: it is refused.
    """
    form = chat_output_format(conversation, prompt, model)
    return PreparedChat(prompt, form, await chat_grammar(conversation, constraint, form, model, turn, ignored))


async def build_chat_request(
    conversation: Conversation,
    spec: AnswerSpec,
    arrival: Arrival,
    services: ModelServices,
    prompts: Prompts | None = None,
) -> GenerationRequest:
    """Return the requests of a checked conversation. `prompts`: None: they are made here. Raises InvalidRequest."""
    if prompts is None:
        is_bounded = spec.truncate_prompt_tokens is None
        prompts = (await encode_chat(conversation, services, is_bounded=is_bounded),)
    note_effort(conversation, services, arrival.ignored)
    turn = trial_turn(spec, arrival)
    token_ids, ignored = prompts[0].token_ids, arrival.ignored
    prepared = await prepare_chat(conversation, spec.constraint, token_ids, services, turn, ignored)
    return await _build(spec, prompts, arrival, services, prepared.grammar, prepared.output_format)


async def build_completion_request(
    spec: AnswerSpec, prompts: Prompts, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the requests of a completion. Raises InvalidRequest."""
    grammar = await answer_grammar(spec.constraint, services, trial_turn(spec, arrival))
    return await _build(spec, prompts, arrival, services, grammar, OutputFormat(is_continued=True))


async def _build(
    spec: AnswerSpec,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    services: ModelServices,
    grammar: str,
    output_format: OutputFormat,
) -> GenerationRequest:
    _check_limits(spec, len(prompts), services.config)
    if spec.truncate_prompt_tokens is not None:
        prompts = [_truncated(prompt, spec.truncate_prompt_tokens, spec.max_tokens, services) for prompt in prompts]
    terms = CallTerms.of(spec, arrival, services)
    services.uses.keep_alive_s = _keep_alive_s(spec)
    return GenerationRequest(
        response_id=spec.response_id or spec.id_prefix + arrival.request_id,
        arrival=arrival,
        model=services.model.name,
        requests=await _requests(spec, prompts, services, terms, grammar),
        prompts=tuple(prompts),
        stop_strings=tuple(spec.stop),
        service_tier=terms.tier.name,
        is_streamed=spec.stream,
        has_logprobs=spec.num_logprobs is not None,
        includes_usage=spec.includes_usage,
        has_continuous_usage=spec.has_continuous_usage,
        echoes=spec.echo,
        output_format=output_format,
        text_options=TextOptions(spec.include_stop_str_in_output, not spec.skip_special_tokens, spec.return_token_ids),
        has_token_ids=spec.return_token_ids,
        calls_functions=spec.calls_functions,
        num_prompt_logprobs=spec.prompt_logprobs,
        names_tokens_by_id=spec.return_tokens_as_token_ids,
        named_slo=terms.slo,
        grammar_param=spec.constraint.param if spec.constraint is not None else "tools",
    )


def _truncated(prompt: Prompt, num_tokens: int, max_tokens: int | None, services: ModelServices) -> Prompt:
    if num_tokens == -1:
        num_tokens = max(services.model.max_context_len - (max_tokens or 1), 1)
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or above 0.", param="truncate_prompt_tokens")
    if len(prompt.token_ids) <= num_tokens:
        return prompt
    if prompt.pictures:
        raise InvalidRequest(
            "truncate_prompt_tokens is not supported with pictures.",
            param="truncate_prompt_tokens",
            code="unsupported_parameter",
        )
    token_ids = prompt.token_ids[-num_tokens:]
    return Prompt(token_ids, services.tokenizer.decode(token_ids))


def _check_limits(spec: AnswerSpec, num_prompts: int, config: GatewayConfig) -> None:
    if spec.n > config.max_choices:
        raise InvalidRequest(f"n must be at most {config.max_choices}.", param="n")
    if len(spec.stop) > config.max_stop_strings:
        message = f"{spec.stop_param} must hold at most {config.max_stop_strings} strings."
        raise InvalidRequest(message, param=spec.stop_param)
    if spec.n * num_prompts > config.max_concurrent_requests:
        raise InvalidRequest(f"More than {config.max_concurrent_requests} choices in one request.", param="prompt")


async def _requests(
    spec: AnswerSpec, prompts: Sequence[Prompt], services: ModelServices, terms: CallTerms, grammar: str
) -> tuple[Request, ...]:
    seed = spec.seed if spec.seed is not None else secrets.randbits(63)
    max_context_len = services.model.max_context_len
    limits = []
    for index, prompt in enumerate(prompts):
        param = param_at(spec.prompt_param, index, of=len(prompts))
        limits.append(_max_tokens(len(prompt.token_ids), max_context_len, spec, param=param))
    # What lists name is read once for all prompts: of 256 bad words alone that takes milliseconds.
    length = rough_length([spec.bad_words, spec.allowed_token_ids, spec.logit_bias])
    shared = await services.lanes.run(length, partial(_sampling_params, spec, limits[0], services, grammar))
    requests: list[Request] = []
    for prompt, max_tokens in zip(prompts, limits, strict=True):
        for choice in range(spec.n):
            sampling = replace(shared, max_tokens=max_tokens, seed=choice_seed(seed, choice))
            requests.append(terms.request(len(requests), prompt, sampling))
        if len(requests) < len(prompts) * spec.n:
            await asyncio.sleep(0)  # streams continue between prompts
    return tuple(requests)


def _sampling_params(spec: AnswerSpec, max_tokens: int, services: ModelServices, grammar: str) -> SamplingParams:
    defaults = services.model.sampling
    echoed_logprobs = spec.num_logprobs if spec.echo else None
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=spec.min_tokens,
        temperature=_or_default(spec.temperature, defaults.temperature),
        top_p=_or_default(spec.top_p, defaults.top_p),
        top_k=max(_or_default(spec.top_k, defaults.top_k), 0),
        min_p=_or_default(spec.min_p, defaults.min_p),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=_or_default(spec.repetition_penalty, defaults.repetition_penalty),
        ignore_eos=spec.ignore_eos,
        stop_token_ids=check_token_ids(spec.stop_token_ids, services, param="stop_token_ids"),
        logit_bias=_logit_bias(spec, services),
        allowed_token_ids=allowed_token_ids(spec, services),
        bad_words=bad_words(spec.bad_words, services.tokenizer),
        num_logprobs=spec.num_logprobs,
        num_prompt_logprobs=_highest(echoed_logprobs, spec.prompt_logprobs),
        grammar=with_free_blanks(grammar) if spec.has_free_blanks else grammar,
    )


def _keep_alive_s(spec: AnswerSpec) -> float | None:
    try:
        return None if spec.keep_alive is None else parse_keep_alive(spec.keep_alive)
    except ValueError as error:
        raise InvalidRequest(f"keep_alive {error}.", param="keep_alive") from error


def _or_default(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value


def _max_tokens(prompt_len: int, max_context_len: int, spec: AnswerSpec, *, param: str) -> int:
    rest = max_context_len - prompt_len
    fitting = rest if spec.max_fitting_tokens is None else min(rest, spec.max_fitting_tokens)
    max_tokens = fitting if spec.max_tokens is None else spec.max_tokens
    if max_tokens > rest or (spec.max_tokens is None and rest < 1):
        answer_len = "at least 1" if spec.max_tokens is None else str(spec.max_tokens)
        where = "the prompt" if param == spec.prompt_param else param
        raise ContextTooLong(
            f"This model's maximum context length is {max_context_len} tokens. However, you requested {prompt_len} "
            f"tokens in {where} and {answer_len} in the answer. Please shorten one of them.",
            param=param,
        )
    return max_tokens


def _highest(first: int | None, second: int | None) -> int | None:
    return second if first is None else max(first, second or 0)


def _logit_bias(spec: AnswerSpec, services: ModelServices) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_ID.fullmatch(key) for key in spec.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
    token_ids = check_token_ids([int(key) for key in spec.logit_bias], services, param="logit_bias")
    return tuple(zip(token_ids, spec.logit_bias.values(), strict=True))


def choice_seed(seed: int, choice: int) -> int:
    """Return the client's own seed for the first choice and one derived from it for each other."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def allowed_token_ids(spec: AnswerSpec, services: ModelServices) -> tuple[int, ...]:
    """Return the tokens that may be chosen, each once; empty: all. Raises InvalidRequest."""
    param = "allowed_token_ids"
    allowed = check_token_ids(list(dict.fromkeys(spec.allowed_token_ids)), services, param=param)
    if not spec.min_tokens or not allowed:
        return allowed
    stops = {*spec.stop_token_ids, *(() if spec.ignore_eos else services.model.eos_token_ids)}
    if stops.issuperset(allowed):
        raise InvalidRequest(f"{param} must hold more than end tokens where min_tokens is set.", param=param)
    return allowed


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the words as the tokens that they are at the beginning of a text and after a space."""
    return tuple(dict.fromkeys(token_ids for word in words for token_ids in _forms(word, tokenizer)))


def _forms(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
    if bare:
        yield bare
    if spaced and (not bare or spaced[-len(bare) :] != bare):  # else a space is a token of its own
        yield spaced

"""Formats responses, streamed or whole, in OpenAI's shapes. Plain dicts and orjson: this runs for every token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import orjson
from typing_extensions import override

from alignedserve.api.errors import error_body
from alignedserve.api.openai.choice_decoder import ChoiceDelta, OffsetLogprob
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.prompt_encoding import Prompt
from alignedserve.api.tools.call_parser import ToolCallDelta, function_call_chunk, tool_call_chunk, whole_tool_calls
from alignedserve.core.request import FinishReason, TokenLogprob
from alignedserve.text.tokenizer import Tokenizer


class TokenNames(Protocol):
    """Texts and bytes of tokens, as log-probabilities show them. A Tokenizer is one."""

    def token_text(self, token_id: int) -> str:
        """Return the token's text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes."""


class TokenIdNames:
    """Names tokens by their ids, which are distinct where texts are not. Implements TokenNames."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


# OpenAI's value for "very unlikely"; JSON has no minus infinity.
_LOWEST = -9999.0


def chat_logprobs(logprobs: Sequence[OffsetLogprob], names: TokenNames) -> dict[str, Any]:
    return {"content": encoded(_chat_entry(entry.logprob, names) for entry in logprobs), "refusal": None}


def completion_logprobs(
    logprobs: Sequence[OffsetLogprob], names: TokenNames, *, first_offset: int = 0
) -> dict[str, list[Any]]:
    return {
        "tokens": [names.token_text(entry.logprob.token_id) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob.logprob) for entry in logprobs],
        "top_logprobs": encoded(_top_by_text(entry.logprob, names) for entry in logprobs),
        "text_offset": [first_offset + entry.text_offset for entry in logprobs],
    }


def echoed_logprobs(
    prompt: Prompt, logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, names: TokenNames
) -> dict[str, list[Any]]:
    return {
        "tokens": [names.token_text(token_id) for token_id in prompt.token_ids],
        "token_logprobs": [None, *(_finite(entry.logprob) for entry in logprobs)],
        "top_logprobs": [None, *encoded(_top_by_text(entry, names) for entry in logprobs)],
        "text_offset": _prompt_offsets(prompt, tokenizer),
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer
) -> list[orjson.Fragment | None]:
    """Return vLLM's `prompt_logprobs`: of each prompt token, by its id, its own and those of the likeliest."""
    return [None, *encoded(_by_id(entry, num_top, tokenizer) for entry in logprobs)]


def encoded(entries: Iterable[Any]) -> list[orjson.Fragment]:
    """Return entries as they stand in a body: no more than one at a time is held as objects. Else a collection of
    garbage looks at millions of them, and encoding them at once lets no other thread run."""
    return [orjson.Fragment(orjson.dumps(entry)) for entry in entries]


def concatenate(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: first[name] + second[name] for name in first}


def _prompt_offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return where each token begins in the prompt's text. A special token has no length where it was added to the
    text, or left out of one that was made of token ids."""
    stream, offset = tokenizer.stream(), 0
    offsets = []
    for token_id in prompt.token_ids:
        offsets.append(offset)
        length, name = len(stream.push((token_id,))), tokenizer.token_text(token_id)
        is_spelled = tokenizer.is_special(token_id) and prompt.text.startswith(name, offset)
        offset += len(name) if is_spelled else length
    return offsets


def _chat_entry(entry: TokenLogprob, names: TokenNames) -> dict[str, Any]:
    top = [_token_fields(token_id, logprob, names) for token_id, logprob in entry.top]
    return _token_fields(entry.token_id, entry.logprob, names) | {"top_logprobs": top}


def _token_fields(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(names.token_bytes(token_id)),
    }


def _top_by_text(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(names.token_text(token_id), _finite(logprob))
    return by_text


def _by_id(entry: TokenLogprob, num_top: int, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    by_id: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in ranked:
        shown = {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        by_id.setdefault(str(token_id), shown)
    return by_id


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class BodyFormatter(Protocol):
    """Formats whole responses in the shapes of one endpoint."""

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the response to a generation that has ended, from all deltas of every choice."""


class Formatter(BodyFormatter, Protocol):
    """Formats responses in the shapes of one API, streamed or whole."""

    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the events for what became visible of a choice; empty when there is nothing to show."""

    def closing_events(self) -> bytes:
        """Return the events after the last choice."""

    def failure_events(self, error: Exception) -> bytes:
        """Return the last events of a stream that fails."""


MakeFormatter = Callable[[Generation], Formatter]
MakeBodyFormatter = Callable[[Generation], BodyFormatter]


async def collect_body(generation: Generation, make_formatter: MakeBodyFormatter) -> bytes:
    """Generate and return the body of a whole response. Raises GenerationError."""
    formatter = make_formatter(generation)
    choices: list[list[ChoiceDelta]] = [[] for _ in generation.request.requests]

    def write() -> bytes:
        body = formatter.body(choices)
        for deltas in choices:  # of many log-probabilities to free them takes long as well
            deltas.clear()
        return body

    async with generation, aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            choices[index].append(delta)
        return await generation.written(write)


def extension_of(generation: Generation) -> dict[str, Any]:
    """Return our own key, only for clients that sent SLO headers and lines of batches with ignored fields."""
    report = generation.slo_report() or {}
    if generation.request.ignored_fields:
        report["ignored_fields"] = generation.request.ignored_fields
    return {"alignedserve": report} if report else {}


class ResponseFormatter(ABC):
    """Formats the response to one generation, in the shapes of one of OpenAI's two endpoints."""

    kind: str
    chunk_kind: str
    plain_choice: bytes  # form of a choice of text alone: its index, its text

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._request = generation.request
        self._tokenizer = tokenizer = generation.tokenizer
        self._names: TokenNames = TokenIdNames(tokenizer) if self._request.names_tokens_by_id else tokenizer
        self._has_begun = [False] * len(generation.request.requests)
        request = self._request
        self._is_plain = not (request.has_logprobs or request.has_token_ids or request.has_continuous_usage)
        empty = orjson.dumps(self._envelope(self.chunk_kind, []))
        self._head = b"data: " + empty[: -len(b"]}")]
        self._plain_tail = b'],"usage":null}\n\n' if request.includes_usage else b"]}\n\n"
        before, _, after = self.plain_choice.partition(b"%b")
        # Of each choice, what stands before and after its text where there is nothing else.
        places = range(len(request.requests))
        self._around_text = [(self._head + before % index, after + self._plain_tail) for index in places]

    def _is_plain_text(self, index: int, delta: ChoiceDelta) -> bool:
        if not (self._is_plain and self._has_begun[index] and delta.text) or delta.finish_reason is not None:
            return False
        return not (delta.reasoning or delta.tool_calls)

    @abstractmethod
    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the events for new text of a choice; empty when there is nothing to show."""

    @abstractmethod
    def _whole_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]: ...

    def closing_events(self) -> bytes:
        """Return the events after the last choice: the usage chunk, where asked for, and the end mark."""
        if not self._request.includes_usage:
            return DONE
        chunk = self._envelope(self.chunk_kind, []) | {"usage": self._generation.usage()}
        return event(orjson.dumps(chunk | self._extension())) + DONE

    def failure_events(self, error: Exception) -> bytes:
        return event(error_body(error))

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        whole_choices = encoded(self._whole_choice(index, deltas) for index, deltas in enumerate(choices))
        whole = self._envelope(self.kind, whole_choices) | {"usage": self._generation.usage()}
        return orjson.dumps(whole | self._whole_extension(choices))

    def _whole_extension(self, choices: Sequence[Sequence[ChoiceDelta]]) -> dict[str, Any]:
        return self._extension()

    def _token_ids(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        if not self._request.has_token_ids:
            return {}
        return {"token_ids": [token_id for delta in deltas for token_id in delta.token_ids]}

    def _prompt_logprobs(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        num_top = self._request.num_prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(_prompt_scores(deltas), num_top, self._tokenizer)}

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt(index).token_ids} if self._request.has_token_ids else {}

    def _prompt(self, index: int) -> Prompt:
        num_per_prompt = len(self._request.requests) // len(self._request.prompts)
        return self._request.prompts[index // num_per_prompt]

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any] | orjson.Fragment]) -> dict[str, Any]:
        return {
            "id": self._request.response_id,
            "object": kind,
            "created": self._request.created,
            "model": self._request.model,
            "service_tier": self._request.service_tier,
            "choices": choices,
        }

    def _extension(self) -> dict[str, Any]:
        return extension_of(self._generation)

    def _last_chunk_extension(self) -> dict[str, Any]:
        if self._request.includes_usage or not self._generation.is_complete:
            return {}
        return self._extension()


class ChatFormatter(ResponseFormatter):
    """Chat completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    plain_choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'

    @override
    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the role once, then thought, text and tool calls, then the finish reason."""
        if self._is_plain_text(index, delta):
            before, after = self._around_text[index]
            return before + orjson.dumps(delta.text) + after
        events = b""
        if not self._has_begun[index]:
            self._has_begun[index] = True
            role = b'{"role":"assistant","content":"","refusal":null}'
            events += self._chunk(index, role, b"null", b"null", self._prompt_token_ids(index))
        if self._request.has_token_ids and delta.token_ids:
            events += self._chunk(index, b"{}", b"null", b"null", token_ids=delta.token_ids)
        if delta.reasoning:
            thought = b'{"reasoning_content":' + orjson.dumps(delta.reasoning) + b"}"
            events += self._chunk(index, thought, b"null", b"null")
        if delta.text or delta.logprobs:
            content = b'{"content":' + orjson.dumps(delta.text) + b"}"
            events += self._chunk(index, content, self._logprobs(delta.logprobs), b"null")
        if delta.tool_calls:
            events += self._call_chunks(index, delta.tool_calls)
        if delta.finish_reason is not None:
            reason = orjson.dumps(self._finish_reason([delta]))
            events += self._chunk(index, b"{}", b"null", reason, self._last_chunk_extension())
        return events

    @override
    def _whole_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(deltas, calls_functions=self._request.calls_functions),
            "logprobs": chat_logprobs(_logprobs_of(deltas), self._names) if self._request.has_logprobs else None,
            "finish_reason": self._finish_reason(deltas),
        } | self._token_ids(deltas)

    def _call_chunks(self, index: int, deltas: Sequence[ToolCallDelta]) -> bytes:
        if not self._request.calls_functions:
            calls = b'{"tool_calls":' + orjson.dumps([tool_call_chunk(delta) for delta in deltas]) + b"}"
            return self._chunk(index, calls, b"null", b"null")
        payloads = [b'{"function_call":' + orjson.dumps(function_call_chunk(delta)) + b"}" for delta in deltas]
        return b"".join([self._chunk(index, payload, b"null", b"null") for payload in payloads])

    def _finish_reason(self, deltas: Sequence[ChoiceDelta]) -> str | None:
        reason = _finish_reason_of(deltas)
        is_call = reason == FinishReason.TOOL_CALLS.value and self._request.calls_functions
        return "function_call" if is_call else reason

    @override
    def _whole_extension(self, choices: Sequence[Sequence[ChoiceDelta]]) -> dict[str, Any]:
        return self._prompt_token_ids(0) | self._prompt_logprobs(choices[0]) | self._extension()

    def _logprobs(self, logprobs: Sequence[OffsetLogprob]) -> bytes:
        return orjson.dumps(chat_logprobs(logprobs, self._names)) if self._request.has_logprobs else b"null"

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes,
        reason: bytes,
        extension: dict[str, Any] | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes:
        more = b',"token_ids":' + orjson.dumps(token_ids) if token_ids else b""
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, reason, more)
        if not extension:
            return self._head + choice + self._tail()
        return self._head + choice + b"]," + orjson.dumps(extension)[1:-1] + self._tail()[1:]

    def _tail(self) -> bytes:
        if not self._request.has_continuous_usage:
            return self._plain_tail
        return b'],"usage":' + orjson.dumps(self._generation.usage()) + b"}\n\n"


class CompletionFormatter(ResponseFormatter):
    """Completions; with `echo` each choice begins with its prompt."""

    kind = chunk_kind = "text_completion"
    plain_choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'

    @override
    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        if self._is_plain_text(index, delta):
            before, after = self._around_text[index]
            return before + orjson.dumps(delta.text) + after
        is_first, self._has_begun[index] = not self._has_begun[index], True
        begins_with_prompt = is_first and self._request.echoes
        shows_tokens = self._request.has_token_ids and delta.token_ids
        if not (delta.text or delta.logprobs or delta.finish_reason is not None or begins_with_prompt or shows_tokens):
            return b""
        choice = self._choice(index, [delta], begins_with_prompt) | (self._prompt_token_ids(index) if is_first else {})
        chunk = self._envelope(self.chunk_kind, [choice])
        if self._request.includes_usage:
            chunk["usage"] = self._generation.usage() if self._request.has_continuous_usage else None
        if delta.finish_reason is not None:
            chunk |= self._last_chunk_extension()
        return event(orjson.dumps(chunk))

    @override
    def _whole_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        of_prompt = self._prompt_token_ids(index) | self._prompt_logprobs(deltas)
        return self._choice(index, deltas, self._request.echoes) | of_prompt

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta], begins_with_prompt: bool) -> dict[str, Any]:
        text = _text_of(deltas)
        return {
            "index": index,
            "text": self._prompt(index).text + text if begins_with_prompt else text,
            "logprobs": self._logprobs(index, deltas, begins_with_prompt) if self._request.has_logprobs else None,
            "finish_reason": _finish_reason_of(deltas),
        } | self._token_ids(deltas)

    def _logprobs(self, index: int, deltas: Sequence[ChoiceDelta], begins_with_prompt: bool) -> dict[str, list[Any]]:
        prompt = self._prompt(index)
        first_offset = len(prompt.text) if self._request.echoes else 0
        generated = completion_logprobs(_logprobs_of(deltas), self._names, first_offset=first_offset)
        if not begins_with_prompt:
            return generated
        num_top = self._request.requests[0].sampling.num_logprobs or 0
        scores = [replace(entry, top=entry.top[:num_top]) for entry in _prompt_scores(deltas)]
        echoed = echoed_logprobs(prompt, scores, self._tokenizer, self._names)
        return concatenate(echoed, generated)


def _message(deltas: Sequence[ChoiceDelta], *, calls_functions: bool) -> dict[str, Any]:
    text, calls = _text_of(deltas), whole_tool_calls(call for delta in deltas for call in delta.tool_calls)
    thought = "".join([delta.reasoning for delta in deltas])
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    if calls and calls_functions:
        return message | {"function_call": calls[0]["function"]}
    return message | ({"tool_calls": calls} if calls else {})


def _text_of(deltas: Sequence[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _logprobs_of(deltas: Sequence[ChoiceDelta]) -> list[OffsetLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]


def _prompt_scores(deltas: Sequence[ChoiceDelta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.prompt_logprobs]


def _finish_reason_of(deltas: Sequence[ChoiceDelta]) -> str | None:
    reason = deltas[-1].finish_reason if deltas else None
    return None if reason is None else reason.value

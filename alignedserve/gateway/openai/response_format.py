"""The bytes of an answer, streamed or whole, in OpenAI's shapes. Plain dicts and orjson: this runs for every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from alignedserve.core.request import TokenLogprob
from alignedserve.gateway.openai.choice_decoder import Piece, ShownToken
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.logprobs import chat_logprobs, completion_logprobs, joined, prompt_logprobs
from alignedserve.gateway.openai.request_builder import Plan
from alignedserve.runtime.model.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and body of one answer repeats, and what shapes it."""

    answer_id: str
    created: int
    model: str
    tier: str
    has_logprobs: bool = False
    includes_usage: bool = False  # streams only
    echoes: bool = False  # completions only

    def around(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object with these choices."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.tier,
            "choices": choices,
        }


class Answer(Protocol):
    """How one endpoint writes its answers."""

    def events(self, index: int, piece: Piece, extra: dict[str, Any] | None) -> bytes:
        """Events for what became visible of a choice; empty when nothing did. `extra` goes into the last one."""

    def closing(self, generation: Generation) -> bytes:
        """Events after the last choice has ended."""

    def body(self, generation: Generation, choices: Sequence[Sequence[Piece]]) -> bytes:
        """The whole answer at once."""


class ChatAnswer:
    """Chat completions."""

    def __init__(self, envelope: Envelope, plan: Plan, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._begun = [False] * len(plan.requests)
        whole = orjson.dumps(envelope.around("chat.completion.chunk", []))
        self._head = b"data: " + whole[: -len(b"]}")]
        self._tail = b'],"usage":null}\n\n' if envelope.includes_usage else b"]}\n\n"

    def events(self, index: int, piece: Piece, extra: dict[str, Any] | None) -> bytes:
        """The role once, then text, then the reason for the end."""
        events = b""
        if not self._begun[index]:
            self._begun[index] = True
            events += self._chunk(index, b'{"role":"assistant","content":"","refusal":null}', b"null", b"null")
        if piece.text or piece.tokens:
            delta = b'{"content":' + orjson.dumps(piece.text) + b"}"
            events += self._chunk(index, delta, self._logprobs(piece.tokens), b"null")
        if piece.finish_reason is not None:
            reason = orjson.dumps(piece.finish_reason.value)
            events += self._chunk(index, b"{}", b"null", reason, _members(extra))
        return events

    def closing(self, generation: Generation) -> bytes:
        """The usage chunk, where asked for, and the end mark."""
        return _closing(self._envelope, "chat.completion.chunk", generation)

    def body(self, generation: Generation, choices: Sequence[Sequence[Piece]]) -> bytes:
        """The whole answer at once."""
        shown = [self._choice(index, pieces) for index, pieces in enumerate(choices)]
        whole = self._envelope.around("chat.completion", shown) | {"usage": generation.usage()}
        return orjson.dumps(whole | _extension(generation))

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        return {
            "index": index,
            "message": {"role": "assistant", "content": _text_of(pieces), "refusal": None},
            "logprobs": chat_logprobs(tokens, self._tokenizer) if self._envelope.has_logprobs else None,
            "finish_reason": _reason_of(pieces),
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> bytes:
        if not self._envelope.has_logprobs:
            return b"null"
        return orjson.dumps(chat_logprobs(tokens, self._tokenizer))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, reason: bytes, members: bytes = b"") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._head + choice + (b"]" + members + self._tail[1:] if members else self._tail)


class CompletionAnswer:
    """Completions; with `echo` each choice begins with its prompt."""

    def __init__(self, envelope: Envelope, plan: Plan, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._plan = plan
        self._tokenizer = tokenizer
        self._num_per_prompt = len(plan.requests) // len(plan.prompts)
        self._begun = [False] * len(plan.requests)

    def events(self, index: int, piece: Piece, extra: dict[str, Any] | None) -> bytes:
        """One event per piece."""
        is_first, self._begun[index] = not self._begun[index], True
        begins_with_prompt = is_first and self._envelope.echoes
        if not (piece.text or piece.tokens or piece.finish_reason is not None or begins_with_prompt):
            return b""
        chunk = self._envelope.around("text_completion", [self._choice(index, [piece], begins_with_prompt)])
        if self._envelope.includes_usage:
            chunk["usage"] = None
        return event(orjson.dumps(chunk | (extra or {})))

    def closing(self, generation: Generation) -> bytes:
        """The usage chunk, where asked for, and the end mark."""
        return _closing(self._envelope, "text_completion", generation)

    def body(self, generation: Generation, choices: Sequence[Sequence[Piece]]) -> bytes:
        """The whole answer at once."""
        shown = [self._choice(index, pieces, self._envelope.echoes) for index, pieces in enumerate(choices)]
        whole = self._envelope.around("text_completion", shown) | {"usage": generation.usage()}
        return orjson.dumps(whole | _extension(generation))

    def _choice(self, index: int, pieces: Sequence[Piece], begins_with_prompt: bool) -> dict[str, Any]:
        prompt = self._plan.prompts[index // self._num_per_prompt]
        text = _text_of(pieces)
        return {
            "index": index,
            "text": prompt.text + text if begins_with_prompt else text,
            "logprobs": self._logprobs(index, pieces, begins_with_prompt) if self._envelope.has_logprobs else None,
            "finish_reason": _reason_of(pieces),
        }

    def _logprobs(self, index: int, pieces: Sequence[Piece], begins_with_prompt: bool) -> dict[str, list[Any]]:
        prompt = self._plan.prompts[index // self._num_per_prompt]
        tokens = [token for piece in pieces for token in piece.tokens]
        first_offset = len(prompt.text) if self._envelope.echoes else 0
        generated = completion_logprobs(tokens, self._tokenizer, first_offset=first_offset)
        if not begins_with_prompt:
            return generated
        scores: list[TokenLogprob] = [score for piece in pieces for score in piece.prompt_scores]
        return joined(prompt_logprobs(prompt, scores, self._tokenizer), generated)


def _closing(envelope: Envelope, kind: str, generation: Generation) -> bytes:
    if not envelope.includes_usage:
        return DONE
    chunk = envelope.around(kind, []) | {"usage": generation.usage()}
    return event(orjson.dumps(chunk | _extension(generation))) + DONE


def _extension(generation: Generation) -> dict[str, Any]:
    """Our own key: only for clients that sent SLO headers."""
    report = generation.slo_report()
    return {"alignedserve": report} if report is not None else {}


def extension_for_last_choice(envelope: Envelope, generation: Generation) -> dict[str, Any] | None:
    """What the last choice's last event carries when no usage chunk follows it."""
    if envelope.includes_usage or not generation.is_complete:
        return None
    return _extension(generation) or None


def _members(extra: dict[str, Any] | None) -> bytes:
    """`,"name":value` for each, to be put into a preformatted object."""
    return b"," + orjson.dumps(extra)[1:-1] if extra else b""


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _reason_of(pieces: Sequence[Piece]) -> str | None:
    reason = pieces[-1].finish_reason if pieces else None
    return None if reason is None else reason.value

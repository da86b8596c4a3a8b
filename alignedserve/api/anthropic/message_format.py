"""Formats messages, streamed or whole, in the shapes of Anthropic's API."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from alignedserve.api.anthropic.message_request import THREAD_UNSUPPORTED, MessagesRequest
from alignedserve.api.errors import Overloaded, error_message, http_error_of
from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import extension_of
from alignedserve.api.tools.call_parser import ToolCallDelta
from alignedserve.core.request import FinishReason

_OVERLOADED_STATUS = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}


def anthropic_error_body(error: Exception, *, request_id: str) -> bytes:
    """Return the error object for this error. There is no member for the field to blame: the message names it."""
    message, param = error_message(error), getattr(error, "param", None)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    view = error_view(message, anthropic_status(error), request_id)
    if getattr(error, "code", None) == THREAD_UNSUPPORTED:
        view["error"]["details"] = {"error_code": THREAD_UNSUPPORTED}
    return orjson.dumps(view)


def error_view(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    """Return the error object of a response with this status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_status(error: Exception) -> int:
    """Return the HTTP status of the response for this error."""
    return _OVERLOADED_STATUS if isinstance(error, Overloaded) else http_error_of(error).status


Event = dict[str, Any]

# The member of a block that each kind of delta extends.
_EXTENDED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}

_SERVICE_TIERS = {"default": "standard", "priority": "priority", "flex": "batch"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlocks:
    """Makes the events of content blocks. Thoughts that are not shown leave an empty block with their signature."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open: str | int | None = None  # the kind of the open block, or the number of its call
        self._index = -1  # of the open or the last block
        self._thought = hashlib.blake2b(digest_size=16)

    def extend(self, delta: ChoiceDelta) -> Iterator[Event]:
        for piece in delta.in_order:
            yield from self._extend(piece)

    def _extend(self, delta: ChoiceDelta) -> Iterator[Event]:
        if delta.reasoning:
            self._thought.update(delta.reasoning.encode())
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            yield from self._extend_call(call)

    def close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            # The signature is a digest of the thought, shown or not; it proves nothing.
            yield self._delta({"type": "signature_delta", "signature": self._thought.hexdigest()})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _extend_call(self, call: ToolCallDelta) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        yield from self._switch(call.call_index, block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _switch(self, key: str | int, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == key:
            return
        yield from self.close()
        self._open = key
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def collect_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    added: list[dict[str, list[str]]] = []  # to the members of each block: joined once, as a long text has many pieces
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            added.append({})
        elif event["type"] == "content_block_delta":
            name = _EXTENDED[event["delta"]["type"]]
            added[-1].setdefault(name, [blocks[-1].get(name, "")]).append(event["delta"][name])
    for block, members in zip(blocks, added, strict=True):
        block.update({name: "".join(pieces) for name, pieces in members.items()})
    return [_with_input(block) for block in blocks]


def _with_input(block: dict[str, Any]) -> dict[str, Any]:
    text = block.pop("partial_json", None)
    if text is None:
        return block
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return block
    return block | {"input": value} if isinstance(value, dict) else block


def server_sent_event(kind: str, payload: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"


class MessageFormatter:
    """Formats the one answer of a generation."""

    def __init__(self, generation: Generation, body: MessagesRequest) -> None:
        self._generation = generation
        self._request = generation.request
        self._body = body
        self._has_begun = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        is_omitted = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks = ContentBlocks(shows_thinking=not is_omitted)

    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        events = [] if self._has_begun else [self._message_start(), {"type": "ping"}]
        self._has_begun = True
        events += self._blocks.extend(delta)
        self._note_stop(delta)
        return _encode(events)

    def closing_events(self) -> bytes:
        usage = self._usage()
        del usage["service_tier"]
        message_delta = {"type": "message_delta", "delta": self._stop, "usage": usage} | extension_of(self._generation)
        return _encode([*self._blocks.close(), message_delta, {"type": "message_stop"}])

    def failure_events(self, error: Exception) -> bytes:
        request_id = self._request.response_id.removeprefix("msg_")
        return server_sent_event("error", anthropic_error_body(error, request_id=request_id))

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        events: list[Event] = []
        for delta in choices[0]:
            events += self._blocks.extend(delta)
            self._note_stop(delta)
        events += self._blocks.close()
        return orjson.dumps(self._message(collect_blocks(events)) | self._stop | extension_of(self._generation))

    def _message_start(self) -> dict[str, Any]:
        return {"type": "message_start", "message": self._message([]) | self._stop}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": _SERVICE_TIERS[self._request.service_tier],
        }
        details = usage.get("completion_tokens_details")
        return counts | ({"output_tokens_details": {"thinking_tokens": details["reasoning_tokens"]}} if details else {})

    def _note_stop(self, delta: ChoiceDelta) -> None:
        if delta.stop_string is not None:
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_string}
        elif delta.finish_reason is not None:
            self._stop["stop_reason"] = self._stop_reason(delta.finish_reason)

    def _stop_reason(self, reason: FinishReason) -> str:
        has_all_tokens = self._request.requests[0].sampling.max_tokens == self._body.max_tokens
        if reason is FinishReason.LENGTH and not has_all_tokens:
            return "model_context_window_exceeded"
        return _STOP_REASONS[reason.value]


def _encode(events: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(server_sent_event(event["type"], orjson.dumps(event)) for event in events)

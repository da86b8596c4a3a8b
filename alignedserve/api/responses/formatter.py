"""Formats responses, streamed or whole. Plain dicts and orjson: this runs for every token."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from alignedserve.api.errors import error_body
from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.logprobs import chat_logprobs
from alignedserve.api.openai.response_format import extension_of
from alignedserve.api.responses.output import Event, OutputBuilder
from alignedserve.api.responses.parsing import offered_functions, tool_view
from alignedserve.api.responses.schemas import CreateResponseRequest, TextOptions, known_fields
from alignedserve.core.request import FinishReason

_ECHOED = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "temperature", "tool_choice", "top_p"),
    *("truncation", "user"),
)


def new_response(
    asked: CreateResponseRequest, *, response_id: str, created: int, model: str, service_tier: str, is_stored: bool
) -> dict[str, Any]:
    """Return a response before anything has been generated."""
    reasoning = asked.reasoning
    return (
        {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": service_tier,
            "store": is_stored,
            "text": _text(asked.text),
            "tools": [tool_view(tool) for tool in asked.tools],
            "top_logprobs": asked.top_logprobs or 0,
            "usage": None,
        }
        | {name: getattr(asked, name) for name in _ECHOED}
        | _conversation(asked)
    )


def _conversation(asked: CreateResponseRequest) -> dict[str, Any]:
    return {} if asked.conversation_id is None else {"conversation": {"id": asked.conversation_id}}


def _text(asked: TextOptions | None) -> dict[str, Any]:
    text: dict[str, Any] = {"format": {"type": "text"}}
    if asked is not None and asked.format is not None:
        text["format"] = known_fields(asked.format, with_unset=False)
    if asked is not None and asked.verbosity is not None:
        text["verbosity"] = asked.verbosity
    return text


class ResponsesFormatter:
    """Formats the response to one generation. Implements Formatter."""

    def __init__(self, generation: Generation, *, asked: CreateResponseRequest, is_stored: bool = False) -> None:
        request = generation.request
        self.response = new_response(  # as it is now
            asked,
            response_id=request.response_id,
            created=request.created,
            model=request.model,
            service_tier=request.service_tier,
            is_stored=is_stored,
        )
        self._generation = generation
        self._output = OutputBuilder(
            request.response_id,
            show_logprobs=lambda logprobs: chat_logprobs(logprobs, generation.tokenizer)["content"],
            function_names={one.chat_name: one.names for one in offered_functions(asked.tools)},
        )
        self._num_events = 0
        self._finish_reason: FinishReason | None = None

    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the events for what became visible; the first ones tell of the response itself."""
        begin = b"" if self._num_events else self._opening_events()
        self._finish_reason = delta.finish_reason or self._finish_reason
        return begin + self._numbered(self._output.add(delta))

    def closing_events(self) -> bytes:
        """Return the events that end the last item and the response, which those of a failure may still replace."""
        num_sent = self._num_events
        events = self._numbered(self._output.end(is_complete=not self._is_cut))
        self._end()
        events += self._numbered([self._response_event(self.response["status"])])
        self._num_events = num_sent
        return events

    def failure_events(self, error: Exception) -> bytes:
        """Return the event of a response that failed: it holds the items so far."""
        message = orjson.loads(error_body(error))["error"]["message"]
        failed = {"status": "failed", "error": {"code": "server_error", "message": message}}
        self.response |= failed | {"output": self._output.items}
        return self._numbered([self._response_event("failed")])

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the whole response."""
        for delta in choices[0]:
            self._finish_reason = delta.finish_reason or self._finish_reason
            for _ in self._output.add(delta):
                pass
        for _ in self._output.end(is_complete=not self._is_cut):
            pass
        self._end()
        return orjson.dumps(self.response)

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason is FinishReason.LENGTH

    def _opening_events(self) -> bytes:
        return self._numbered(self._response_event(name) for name in ("created", "in_progress"))

    def _end(self) -> None:
        self.response |= {"output": self._output.items, "usage": _usage(self._generation.usage())}
        if self._is_cut:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        self.response |= extension_of(self._generation)

    def _response_event(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.response}

    def _numbered(self, events: Iterable[Event]) -> bytes:
        """Number the events, and encode each before the next one changes an item."""
        return b"".join(self._encoded(event) for event in events)

    def _encoded(self, event: Event) -> bytes:
        self._num_events += 1
        return encoded_event(event, self._num_events - 1)


def encoded_event(event: Event, number: int) -> bytes:
    """Return an event as it is sent."""
    payload = orjson.dumps(event | {"sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), payload)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return chat's usage under the names of the Responses API."""
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }

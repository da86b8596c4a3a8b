"""Helpers of the tests of the Responses API: events and responses as OpenAI's own types read them."""

import json
from typing import Any

import httpx

from tests.support.lazy_types import LazyType

_EVENT = LazyType("openai.types.responses", "ResponseStreamEvent")
_RESPONSE = LazyType("openai.types.responses", "Response")


def response_of(answer: httpx.Response) -> dict[str, Any]:
    """Return a response that OpenAI's type accepts."""
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    _RESPONSE.check(found)
    return found


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream: each is of its announced type, accepted by OpenAI's type, and in order."""
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _EVENT.check(event)
        events.append(event)
    return events


def text_of(response: dict[str, Any]) -> str:
    """Return the text of the one message that a response consists of."""
    [item] = response["output"]
    [part] = item["content"]
    text: str = part["text"]
    return text

"""Helpers of the tests of the Messages API: calls, events and errors checked by the types of Anthropic's SDK."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
from starlette.applications import Starlette

from alignedserve.core.request import Request
from tests.gateway.support import Gateway, gateway
from tests.harnesses.scripted_backend import Script
from tests.support.lazy_types import LazyType

_EVENT = LazyType("anthropic.types", "RawMessageStreamEvent")
_MESSAGE = LazyType("anthropic.types", "Message")
_ERROR = LazyType("anthropic.types.shared", "ErrorResponse")
# In Anthropic's description of its errors, though not among the types of its SDK.
_UNTYPED_KINDS = ("request_too_large", "timeout_error")


async def ask(served: Gateway, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}], **fields}
    return await served.client.post("/v1/messages", json=body, headers=headers)


async def count(served: Gateway, **fields: Any) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
    response = await served.client.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 200, response.text
    num_tokens: int = response.json()["input_tokens"]
    return num_tokens


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    _MESSAGE.check(message)
    return message


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names must be their types."""
    assert response.status_code == 200, response.text
    *texts, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for text in texts:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            _EVENT.check(event)
        events.append(event)
    return events


def failure_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error, which must be complete and alone."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"].keys() - {"details"} == {"type", "message"}
    if body["error"]["type"] not in _UNTYPED_KINDS:
        _ERROR.check(body)
    error: dict[str, Any] = body["error"]
    return error


@asynccontextmanager
async def sdk_client(
    script: Callable[[Request], Script] | None = None, *, api_key: str = "any", **options: Any
) -> AsyncIterator[tuple[Any, Gateway]]:
    """Anthropic's SDK in front of an app, without a socket."""
    async with gateway(script, **options) as served, sdk_of(served.app, api_key) as client:
        yield client, served


def sdk_of(app: Starlette, api_key: str = "any") -> Any:
    import anthropic

    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return anthropic.AsyncAnthropic(
        base_url="http://localhost", api_key=api_key, max_retries=0, http_client=http_client
    )

"""What each API says of requests that wait: comments in silent streams, and refusals in its own form."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from alignedserve.api.backend.interface import RequestStream
from alignedserve.api.errors import Overloaded, ResourceUnavailable, TimedOut
from alignedserve.api.models.model_registry import ModelRegistry
from alignedserve.core.request import Request
from alignedserve.gateway import streaming
from alignedserve.gateway.services import Services
from alignedserve.gateway.streaming import EventSender
from tests.gateway.support import Gateway, documents_held, error_of, gateway, saying
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each
from tests.support.waiting import holds

COMMENT = ": waiting\n\n"
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMPLETION = ("/v1/completions", {"prompt": "hello"})
RESPONSE = ("/v1/responses", {"input": "hello", "store": False})
MESSAGE = ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100})
APIS = each("asked", [CHAT, COMPLETION, RESPONSE, MESSAGE], ids=lambda asked: asked[0])

Asked = tuple[str, dict[str, Any]]


async def post(served: Gateway, asked: Asked, **fields: Any) -> httpx.Response:
    path, body = asked
    return await served.client.post(path, json={"model": "tiny", **body, **fields})


def quick_comments(monkeypatch: pytest.MonkeyPatch, count: int, after_s: float) -> asyncio.Event:
    """Let comments come after a short silence; return what is set once there were so many."""
    monkeypatch.setattr(streaming, "_CHECK_PAUSE_S", 0.02)
    monkeypatch.setattr(streaming, "_COMMENT_AFTER_S", after_s)
    have_come, num_left, send = asyncio.Event(), count, EventSender.send_events

    async def send_and_count(sender: EventSender, events: bytes) -> None:
        nonlocal num_left
        await send(sender, events)
        num_left -= events.decode() == COMMENT
        if num_left == 0:
            have_come.set()

    monkeypatch.setattr(EventSender, "send_events", send_and_count)
    return have_come


def events_of(response: httpx.Response) -> list[str]:
    """Return the names of events, comments among them; each must be whole."""
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    return [block.partition("\n")[0] if block.startswith("event:") else block[:9] for block in blocks]


def test_a_comment_comes_every_fifteen_seconds() -> None:
    assert streaming._COMMENT_AFTER_S == 15.0
    assert streaming._CHECK_PAUSE_S <= 5.0  # and not much later


async def test_thousands_of_streams_that_came_together_are_not_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "_CHECK_PAUSE_S", 0.4)
    pauses_s, wait, num_looks = list[float](), asyncio.wait, 0

    def noting(*arguments: Any, timeout: float, **named: Any) -> Any:
        pauses_s.append(timeout)
        return wait(*arguments, timeout=timeout, **named)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def check() -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(asyncio, "wait", noting)
    work = [streaming.while_connected(receive, asyncio.Event().wait(), check) for _ in range(64)]
    streams = [asyncio.create_task(one) for one in work]
    await holds(lambda: num_looks >= 64)
    for stream in streams:
        stream.cancel()
    # By the first pause of each, not by the clock: after a moment without the processor many looks come together.
    quarters = {int(4 * seconds / 0.4) for seconds in pauses_s[:64]}
    assert quarters == {0, 1, 2, 3}


@APIS
@each("tier", ["auto", "flex"])
async def test_a_stream_that_waits_gets_comments(monkeypatch: pytest.MonkeyPatch, asked: Asked, tier: str) -> None:
    async with gateway(saying("the quick")) as served:
        quick = await post(served, asked, stream=True, service_tier=tier)
        with monkeypatch.context() as patch:
            have_come, play = quick_comments(patch, 2, after_s=0.05), served.backend._play

            async def play_after_them(*arguments: Any) -> None:
                await have_come.wait()
                await play(*arguments)

            patch.setattr(served.backend, "_play", play_after_them)
            async with asyncio.timeout(20):
                response = await post(served, asked, stream=True, service_tier=tier)
    assert response.status_code == 200
    assert response.text.startswith(COMMENT * 2)
    assert events_of(quick) == [event for event in events_of(response) if event != ": waiting"]


@APIS
async def test_a_stream_that_waits_for_its_model_gets_comments(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    async with gateway(saying("the quick")) as served:
        quick = await post(served, asked, stream=True)
        with monkeypatch.context() as patch:
            have_come = quick_comments(patch, 2, after_s=0.05)
            patch.setattr(ModelRegistry, "is_asleep", lambda *_: not have_come.is_set())
            patch.setattr(Services, "awake_model", lambda *_: have_come.wait())
            async with asyncio.timeout(20):
                response = await post(served, asked, stream=True)
    assert response.text.startswith(COMMENT * 2)
    assert events_of(quick) == [event for event in events_of(response) if event != ": waiting"]


@each(
    "asked",
    [CHAT, RESPONSE, ("/v1/responses/input_tokens", {"input": "hello"}), ("/tokenize", {"prompt": "hello"})],
    ids=lambda asked: asked[0],
)
async def test_a_client_that_leaves_waits_for_no_model(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    path, body = asked
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.0", "method": "POST", "path": path, "query_string": b""}
    scope |= {"headers": headers}
    sent: list[Any] = []

    async with gateway() as served, asyncio.timeout(20):
        is_waiting, has_given_up = asyncio.Event(), asyncio.Event()

        async def wait_for_model(*_: Any) -> None:
            is_waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                has_given_up.set()

        async def receive() -> dict[str, Any]:
            if not is_read.is_set():
                is_read.set()
                return {"type": "http.request", "body": orjson.dumps({"model": "tiny", **body}), "more_body": False}
            await is_waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        is_read = asyncio.Event()
        monkeypatch.setattr(ModelRegistry, "is_asleep", lambda *_: True)
        monkeypatch.setattr(Services, "awake_model", wait_for_model)
        await served.app(scope, receive, send)
        assert has_given_up.is_set()
    assert sent == []


async def test_a_response_that_fails_after_a_comment_begins_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's client takes no other event for the first."""
    with monkeypatch.context() as patch:
        has_come = quick_comments(patch, 1, after_s=0.05)

        async def fail_after_it(request: Request, script: Script, stream: RequestStream) -> None:
            await has_come.wait()
            stream.fail(TimedOut("It is silent."))

        async with gateway() as served, asyncio.timeout(20):
            patch.setattr(served.backend, "_play", fail_after_it)
            response = await post(served, RESPONSE, stream=True)
    named = [event for event in events_of(response) if event != ": waiting"]
    assert named == [f"event: response.{name}" for name in ("created", "in_progress", "failed")]


@APIS
async def test_a_stream_that_pauses_gets_comments(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with monkeypatch.context() as patch:
        has_come = quick_comments(patch, 1, after_s=0.2)
        async with gateway(saying("the quick", held_until=has_come)) as served, asyncio.timeout(20):
            events = events_of(await post(served, asked, stream=True))
    assert events[0] != ": waiting"
    assert events[-1] != ": waiting"
    assert ": waiting" in events


@each("asked", [CHAT, COMPLETION, RESPONSE], ids=lambda asked: asked[0])
@each(
    ("failure", "status", "code", "retry_after"),
    [
        (Overloaded("the queue is full", retry_after_s=7.2), 503, "overloaded", "8"),
        (ResourceUnavailable("the queue is full", retry_after_s=40.0), 429, "resource_unavailable", "40"),
    ],
)
async def test_a_full_queue_is_told_in_openais_form(
    asked: Asked, failure: Overloaded, status: int, code: str, retry_after: str
) -> None:
    async with gateway(lambda _: Script((), failure=failure)) as served:
        for is_streamed in (False, True):
            response = await post(served, asked, stream=is_streamed)
            assert error_of(response, status)["code"] == code
            assert response.headers["retry-after"] == retry_after


@each("kind", [Overloaded, ResourceUnavailable])
async def test_a_full_queue_is_told_in_anthropics_form(kind: type[Overloaded]) -> None:
    failure = kind("the queue is full", retry_after_s=7.2)
    async with gateway(lambda _: Script((), failure=failure)) as served:
        for is_streamed in (False, True):
            response = await post(served, MESSAGE, stream=is_streamed)
            assert (response.status_code, response.headers["retry-after"]) == (529, "8")
            assert response.json()["error"]["type"] == "overloaded_error"


@APIS
async def test_flex_that_finds_no_place_is_refused_and_chat_is_not(asked: Asked) -> None:
    goes_on = asyncio.Event()
    async with gateway(documents_held("the", goes_on), max_best_effort_requests=1) as served:
        waiting = asyncio.create_task(post(served, asked, service_tier="flex"))
        await holds(lambda: served.services.limiter.num_open == 1)
        refused = await post(served, asked, service_tier="flex")
        assert refused.status_code == (529 if asked is MESSAGE else 429)
        assert refused.headers["retry-after"] == "30"
        assert (await post(served, asked)).status_code == 200
        goes_on.set()
        assert (await waiting).status_code == 200

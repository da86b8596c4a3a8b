"""Streams of responses in the background: live, resumed, after losses, and of what ends in other ways."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message, Scope
from typing_extensions import override

from alignedserve.api.errors import ClientDisconnected, Unservable
from alignedserve.batches.responses.response_repository import EventChunk
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import StoreUnavailable
from alignedserve.gateway import streaming
from alignedserve.gateway.call import Call
from alignedserve.gateway.responses import responses_api as store_loss
from alignedserve.gateway.responses import stored_events
from alignedserve.gateway.responses.stored_events import StoredEvents, StoredEventsResponse
from alignedserve.gateway.services import Services
from alignedserve.keys.entry import ANYONE
from alignedserve.keys.ring import digest_of, plain_entry
from alignedserve.messages.state import Change
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually
from tests.gateway.responses.responses_support import events_of, text_of
from tests.gateway.responses.test_responses_background import begin, reached
from tests.gateway.support import error_of, saying
from tests.harnesses.scripted_backend import Script
from tests.support.memory_records import MemoryRecords

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "input": "hello", "background": True, "stream": True}
LONG = " ".join(["the quick brown fox jumps over the lazy dog"] * 4)


async def stream(served: BatchGateway, **fields: Any) -> httpx.Response:
    return await served.client.post("/v1/responses", json=BODY | fields)


async def resume(served: BatchGateway, name: str, **query: Any) -> httpx.Response:
    return await served.client.get(f"/v1/responses/{name}", params={"stream": "true", **query})


def text_in(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_events_are_those_of_a_stream_and_end_with_what_is_stored(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        events = events_of(await stream(served, metadata={"a": "b"}))
        names = [event["type"].removeprefix("response.") for event in events]
        assert names[:3] == ["created", "queued", "in_progress"]
        assert names[-3:] == ["content_part.done", "output_item.done", "completed"]
        last = events[-1]["response"]
        assert (last["id"], last["metadata"], last["status"]) == (events[0]["response"]["id"], {"a": "b"}, "completed")
        assert text_in(events) == text_of(last) == "hello world"
        items = {event["item_id"] for event in events if "item_id" in event}
        assert items == {last["output"][0]["id"]}
        assert (await served.client.get(f"/v1/responses/{last['id']}")).json() == last
        follow_up = {"model": "tiny", "input": "more", "previous_response_id": last["id"]}
        assert (await served.client.post("/v1/responses", json=follow_up)).status_code == 200


async def test_a_stream_is_resumed_from_any_event(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, saying(LONG)) as served:
        whole = events_of(await stream(served))
        name = whole[0]["response"]["id"]
        assert events_of(await resume(served, name)) == whole
        for starting_after in (0, 5, len(whole) - 2):
            text = (await resume(served, name, starting_after=starting_after)).text
            first = whole[starting_after + 1]
            assert text.startswith(f"event: {first['type']}\n")
            assert text.count("event: ") == len(whole) - starting_after - 1
        assert (await resume(served, name, starting_after=len(whole) - 1)).text == ""


async def test_it_is_live_and_goes_on_without_its_client(tmp_path: Path) -> None:
    may_end = asyncio.Event()
    async with batch_gateway(tmp_path, saying(LONG, held_until=may_end)) as served, listening(served.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            async with client.stream("POST", "/v1/responses", json=BODY) as answer:
                seen = ""
                async for piece in answer.aiter_text():
                    seen += piece
                    if seen.count("output_text.delta\n") > 5:
                        break
            name = seen.partition('"id":"')[2].partition('"')[0]
            assert "response.completed" not in seen
            assert (await client.get(f"/v1/responses/{name}")).json()["status"] == "in_progress"
        may_end.set()
        events = events_of(await resume(served, name))
        assert text_in(events) == text_of(events[-1]["response"]) == LONG


async def test_a_new_driver_repeats_no_event(tmp_path: Path) -> None:
    scripts = [saying(LONG), saying(LONG, held_until=asyncio.Event())]
    async with (
        batch_gateway(tmp_path, lambda request: scripts.pop()(request)) as served,
        listening(served.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
        client.stream("POST", "/v1/responses", json=BODY) as answer,
    ):
        pieces = answer.aiter_text()
        seen = ""
        while seen.count("output_text.delta\n") <= 5:
            seen += await anext(pieces)
        await served.stop_driver()
        served.start_driver()
        seen += "".join([piece async for piece in pieces])
        events = events_of(httpx.Response(200, text=seen))
    assert LONG.startswith(text_in(events))
    assert 0 < len(text_in(events)) < len(LONG)
    assert text_of(events[-1]["response"]) == LONG


async def test_a_stream_outlasts_a_store_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_loss, "_PAUSE_S", 0.0)
    monkeypatch.setattr(stored_events, "_POLL_S", 0.0)
    running, over = SimpleNamespace(batch_id="b"), SimpleNamespace(batch_id=None, response=b'{"status":"completed"}')
    found: list[Any] = [running, StoreUnavailable("away"), StoreUnavailable("away"), running, over]

    async def retrieve(_: str) -> Any:
        one = found.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    async def read(_: str, number: int) -> list[EventChunk]:
        return [EventChunk(0, b'event: x\ndata: {"sequence_number":0}\n\n')] if number == 0 else []

    stored = StoredEvents(cast(Any, SimpleNamespace(retrieve=retrieve)), cast(Any, SimpleNamespace(read=read)), "resp")
    events = [event async for event in stored.events() if event]
    assert len(events) == 2  # each once
    assert b"response.completed" in events[-1]


class Leaving(MemoryRecords):
    """Records that are away for some reads of a response once it has been kept."""

    num_away = 0

    @override
    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        if not self.keys_of("response/") and any(getattr(one, "index", "") == "responses/anyone" for one in changes):
            self.num_away = 3
        return await super().commit(changes, unchanged=unchanged)

    @override
    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.num_away and keys[0].startswith("response/"):
            self.num_away -= 1
            raise StoreUnavailable("away")
        return await super().read(keys)


async def test_a_stream_whose_store_leaves_once_it_is_submitted_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_loss, "_PAUSE_S", 0.0)
    records = Leaving()
    async with batch_gateway(tmp_path, records=records) as served:
        events = events_of(await stream(served))
    assert records.num_away == 0
    assert text_in(events) == text_of(events[-1]["response"]) == "hello world"


async def has_stored(served: BatchGateway) -> bool:
    page = await served.records.page("responses/anyone", after=None, limit=1, newest_first=True)
    return page is not None and len(page.members) > 0


async def test_a_cancelled_and_a_failed_one_end_their_streams(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        streaming = asyncio.create_task(stream(served))
        await eventually(partial(has_stored, served))
        page = await served.records.page("responses/anyone", after=None, limit=1, newest_first=True)
        assert page is not None
        await served.client.post(f"/v1/responses/{page.members[0].partition(':')[0]}/cancel")
        events = events_of(await streaming)
    assert [event["type"] for event in events] == ["response.created", "response.queued", "response.incomplete"]
    assert events[-1]["response"]["status"] == "cancelled"
    async with batch_gateway(tmp_path / "b", lambda _: Script((), failure=Unservable("It never fits."))) as served:
        last = events_of(await stream(served))[-1]
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "It never fits.")


async def test_only_what_was_created_as_a_stream_has_events(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, api_keys=("a", "b")) as served:
        served.client.headers["authorization"] = "Bearer a"
        polled = (await begin(served))["id"]
        await reached(served, polled, "completed")
        assert error_of(await resume(served, polled), 400)["code"] == "events_not_stored"
        name = events_of(await stream(served))[0]["response"]["id"]
        assert error_of(await resume(served, name, starting_after="x"), 400)["param"] == "starting_after"
        served.client.headers["authorization"] = "Bearer b"
        error_of(await resume(served, name), 404)


async def test_a_line_of_a_client_cannot_name_a_log(tmp_path: Path) -> None:
    body = {"model": "tiny", "input": "x", "streamed_response": {"id": "resp_" + "0" * 32}}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}).encode() + b"\n"
    async with batch_gateway(tmp_path) as served:
        batch = await served.submit(line, endpoint="/v1/responses")
        over = await served.wait_for(batch["id"])
        [result] = await served.results(over["output_file_id"])
        assert await served.stores.responses.events.read("resp_" + "0" * 32, 0) == []
    assert '"ignored_fields":["streamed_response"]' in result.replace(" ", "")


async def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"event: one"

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    monkeypatch.setattr(streaming, "_SEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(streaming, "_CHECK_PAUSE_S", 0.05)
    stored = cast("StoredEvents", SimpleNamespace(events=events, failure_events=lambda error: b""))
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/responses/resp_1", "headers": []}
    Call(cast("Services", SimpleNamespace(config=GatewayConfig())), scope)
    with pytest.raises(ClientDisconnected, match="does not read"):
        await asyncio.wait_for(StoredEventsResponse(stored)(scope, receive, send), 10.0)


async def num_kept_bytes(served: BatchGateway, key: str | None = None) -> int:
    owner = ANYONE.owner if key is None else plain_entry(digest_of(key)).owner
    page = await served.records.page(f"response-event-chunks/{owner}", after=None, limit=1000, newest_first=True)
    assert page is not None
    names = [member.rpartition(":")[0] for member in page.members]
    chunks = await served.records.read([f"response-event-chunk/{name}" for name in names])
    return sum(len(chunk or b"") for chunk in chunks)


async def test_the_oldest_events_of_a_long_response_make_room(tmp_path: Path) -> None:
    config = GatewayConfig(max_response_events_bytes=6000)
    slow = saying(LONG, token_delay_s=0.03)
    async with batch_gateway(tmp_path, slow, gateway_config=config) as served, listening(served.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            live = events_of(await client.post("/v1/responses", json=BODY))
        assert text_in(live) == LONG  # who reads as they come misses none
        name, count = live[0]["response"]["id"], len(live)
        assert await num_kept_bytes(served) <= 6000
        late = await resume(served, name)
        assert error_of(late, 404)["code"] == "events_not_kept"
        assert error_of(await resume(served, name, starting_after=5), 404)["param"] == "starting_after"
        rest = (await resume(served, name, starting_after=count - 3)).text
        assert (rest.count("event: "), rest.count("response.completed\n")) == (2, 1)
        assert text_of((await served.client.get(f"/v1/responses/{name}")).json()) == LONG


async def test_all_events_of_one_key_have_a_bound_and_those_of_others_stay(tmp_path: Path) -> None:
    config = GatewayConfig(max_events_bytes=20_000)
    headers = [{"x-api-key": key} for key in ("one", "other")]
    async with batch_gateway(tmp_path, saying(LONG), gateway_config=config, api_keys=("one", "other")) as served:
        of_one, of_other = (partial(served.client.post, "/v1/responses", json=BODY, headers=key) for key in headers)
        others = events_of(await of_other())[0]["response"]["id"]
        names = [events_of(await of_one())[0]["response"]["id"] for _ in range(4)]
        assert await num_kept_bytes(served, "one") <= 20_000 * 17 // 16

        async def again(name: str, key: dict[str, str]) -> httpx.Response:
            return await served.client.get(f"/v1/responses/{name}", params={"stream": "true"}, headers=key)

        assert error_of(await again(names[0], headers[0]), 404)["code"] == "events_not_kept"
        assert text_in(events_of(await again(names[-1], headers[0]))) == LONG
        assert text_in(events_of(await again(others, headers[1]))) == LONG

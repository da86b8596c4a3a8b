"""Message batches, through Anthropic's own SDK, unchanged."""

import asyncio
import gzip
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from alignedserve.api.work_lanes import note_class
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.request import Request, RequestClass
from alignedserve.gateway import message_batches
from alignedserve.gateway.message_batches import result_view
from tests.gateway.anthropic.messages_support import sdk_of
from tests.gateway.batches.batch_support import batch_gateway, eventually
from tests.gateway.support import EOS, saying, tokens_of
from tests.harnesses.scripted_backend import Script


def asking(custom_id: str, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]} | fields
    return {"custom_id": custom_id, "params": body}


async def ended(client: Any, batch: Any) -> Any:
    async def has_ended() -> bool:
        return bool((await client.messages.batches.retrieve(batch.id)).processing_status == "ended")

    await eventually(has_ended)
    return await client.messages.batches.retrieve(batch.id)


async def answered(app: Any, path: str) -> list[MutableMapping[str, Any]]:
    """Return what the app sends to a server, which closes the connection where that is no whole response."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.0", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return sent


async def test_each_request_has_a_result_where_its_model_is_gone_before_the_batch_begins(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served, sdk_of(served.app) as client:
        batch = await client.messages.batches.create(requests=[asking("a"), asking("b")])
        served.services.models.replace_all([])
        served.start_driver()
        batch = await ended(client, batch)
        results = await results_of(client, batch)
    assert {name: one.type for name, one in results.items()} == {"a": "errored", "b": "errored"}
    assert batch.request_counts.errored == 2


async def results_of(client: Any, batch: Any) -> dict[str, Any]:
    return {one.custom_id: one.result async for one in await client.messages.batches.results(batch.id)}


async def test_a_batch_and_its_results(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, saying("the dog")) as served, sdk_of(served.app) as client:
        requests = [asking("a"), asking("bad", temperature=3), asking("b", stop_sequences=[" dog"])]
        batch = await client.messages.batches.create(requests=requests)
        assert (batch.processing_status, batch.results_url) == ("in_progress", None)
        batch = await ended(client, batch)
        results = await results_of(client, batch)
        assert {request.request_class for request in served.backend.submitted} == {RequestClass.BEST_EFFORT}
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0)
    assert results["a"].message.content[0].text == "the dog"
    assert results["a"].message.usage.service_tier == "batch"
    assert results["b"].message.stop_sequence == " dog"
    assert results["bad"].error.error.type == "invalid_request_error"
    assert "temperature" in results["bad"].error.error.message
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at


async def test_a_batch_that_is_cancelled(tmp_path: Path) -> None:
    import anthropic

    def slow(_: Request) -> Script:
        return Script((*tokens_of("the dog"), EOS), first_token_delay_s=60.0)

    async with batch_gateway(tmp_path, slow, max_in_flight=1) as served, sdk_of(served.app) as client:
        batch = await client.messages.batches.create(requests=[asking("a"), asking("b")])
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            await client.messages.batches.results(batch.id)
        cancelled = await client.messages.batches.cancel(batch.id)
        assert cancelled.processing_status == "canceling"
        batch = await ended(client, batch)
        results = await results_of(client, batch)
    assert batch.request_counts.canceled == 2
    assert batch.cancel_initiated_at is not None
    assert [result.type for result in results.values()] == ["canceled", "canceled"]


async def test_batches_are_listed_by_the_api_and_the_key_that_made_them(tmp_path: Path) -> None:
    import anthropic

    async with batch_gateway(tmp_path, api_keys=("one", "two"), is_driven=False) as served:
        async with sdk_of(served.app, "one") as mine, sdk_of(served.app, "two") as other:
            made = [await mine.messages.batches.create(requests=[asking("a")]) for _ in range(3)]
            listed = [batch.id async for batch in mine.messages.batches.list(limit=2)]
            assert [batch async for batch in other.messages.batches.list()] == []
            with pytest.raises(anthropic.NotFoundError):
                await other.messages.batches.retrieve(made[0].id)
            newer = await mine.messages.batches.list(before_id=made[0].id, limit=1)
            assert ([batch.id for batch in newer.data], newer.has_more) == ([made[1].id], True)
            newest = await newer.get_next_page()
            assert ([batch.id for batch in newest.data], newest.has_more) == ([made[2].id], False)
            both = await mine.messages.batches.list(before_id=made[0].id)
            assert [batch.id for batch in both.data] == [made[2].id, made[1].id]
            with pytest.raises(anthropic.BadRequestError, match="before_id"):
                await mine.messages.batches.list(before_id="msgbatch_none")
            with pytest.raises(anthropic.BadRequestError, match="both"):
                await mine.messages.batches.list(before_id=made[0].id, after_id=made[0].id)
        headers = {"authorization": "Bearer one"}
        assert (await served.client.get("/v1/batches", headers=headers)).json()["data"] == []
        assert (await served.client.get("/v1/files", headers=headers)).json()["data"] == []
    assert listed == [batch.id for batch in reversed(made)]


def stored_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name in ("files", "results")]


async def test_batches_that_have_ended_are_deleted_while_they_are_listed(tmp_path: Path) -> None:
    import anthropic

    async with (
        batch_gateway(tmp_path, saying("the dog"), api_keys=("one", "two")) as served,
        sdk_of(served.app, "one") as mine,
        sdk_of(served.app, "two") as other,
    ):
        made = [await ended(mine, await mine.messages.batches.create(requests=[asking("a")])) for _ in range(5)]
        assert stored_files(tmp_path)
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.batches.delete(made[0].id)
        with pytest.raises(anthropic.BadRequestError):
            await other.messages.batches.list(after_id=made[0].id)
        deleted = [await mine.messages.batches.delete(batch.id) async for batch in mine.messages.batches.list(limit=2)]
        assert [one.id for one in deleted] == [batch.id for batch in reversed(made)]
        assert {one.type for one in deleted} == {"message_batch_deleted"}
        for again in (mine.messages.batches.delete, mine.messages.batches.retrieve):
            with pytest.raises(anthropic.NotFoundError):
                await again(made[0].id)
        assert (await mine.messages.batches.list()).data == []
    assert [key for kind in ("batch", "progress", "file") for key in served.records.keys_of(f"{kind}/")] == []
    assert stored_files(tmp_path) == []


async def test_a_batch_that_runs_is_not_deleted(tmp_path: Path) -> None:
    import anthropic

    async with batch_gateway(tmp_path, is_driven=False) as served, sdk_of(served.app) as client:
        batch = await client.messages.batches.create(requests=[asking("a")])
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(batch.id)
        assert (await client.messages.batches.retrieve(batch.id)).processing_status == "in_progress"


@pytest.mark.parametrize(
    ("requests", "path"),
    [
        ([], "requests"),
        ([asking("a"), asking("a")], r"requests\[1\].custom_id"),
        ([asking("no spaces")], r"requests\[0\].custom_id"),
        ([{"custom_id": "a", "params": {}}], r"requests\[0\].params.model"),
        ([asking(name) for name in "abcde"], "at most 3 requests"),
        ([asking("a", system="x" * 3000)], "too large"),
    ],
)
async def test_batches_that_are_refused(tmp_path: Path, requests: Any, path: str) -> None:
    import anthropic

    limits: dict[str, Any] = {"max_lines": 3, "max_line_bytes": 2000}
    async with batch_gateway(tmp_path, is_driven=False, **limits) as served, sdk_of(served.app) as client:
        with pytest.raises(anthropic.BadRequestError, match=path):
            await client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.create(requests=[asking("a", model="other")])


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_a_batch_may_be_larger_than_any_other_body(tmp_path: Path, is_compressed: bool) -> None:
    requests = [asking(f"r{number}") for number in range(3000)]
    body = orjson.dumps({"mood": "good", "requests": requests})
    config = GatewayConfig(max_body_bytes=4096, max_json_containers=64)
    async with batch_gateway(tmp_path, is_driven=False, gateway_config=config) as served:
        headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if is_compressed else {})
        content = gzip.compress(body) if is_compressed else body
        answer = await served.client.post("/v1/messages/batches", content=content, headers=headers)
        beyond = await served.client.post("/v1/messages/batches", content=content[:-9], headers=headers)
        (batch,) = await served.stores.repository.active_batches()
        lines = b"".join([chunk async for chunk in served.stores.blobs.chunks(batch.record.input_file_id)])
    assert answer.json()["request_counts"]["processing"] == 3000, answer.text
    assert answer.headers["x-alignedserve-ignored-fields"] == "mood"
    assert [orjson.loads(line)["body"] for line in lines.splitlines()] == [one["params"] for one in requests]
    assert beyond.status_code == 400


async def test_results_that_cannot_be_read_never_look_whole(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served, sdk_of(served.app) as client:
        batch = await client.messages.batches.create(requests=[asking(f"r{number}") for number in range(300)])
        await ended(client, batch)
        path = f"/v1/messages/batches/{batch.id}/results"
        log = tmp_path / "results" / f"{batch.id}.log"
        whole = log.read_bytes()
        for place, status in ((len(whole) // 2, 200), (len(whole) // 300 // 2, 503)):
            log.write_bytes(whole[:place] + b"\0\0\0\0" + whole[place + 4 :])
            start, *parts = await answered(served.app, path)
            assert start["status"] == status
            assert parts[-1].get("more_body", False) == (status == 200)  # an end would make it look whole


async def test_a_batch_is_read_although_much_else_waits_and_not_refused_in_its_middle(tmp_path: Path) -> None:
    goes_on = threading.Event()
    async with batch_gateway(tmp_path, is_driven=False) as served, sdk_of(served.app) as client:

        async def wait(request_class: RequestClass) -> bool:
            note_class(request_class)
            return await served.services.lanes.run(10_000, goes_on.wait)

        classes = [RequestClass.REAL_TIME] * 64 + [RequestClass.BEST_EFFORT] * 48
        others = [asyncio.create_task(wait(request_class)) for request_class in classes]
        await asyncio.sleep(0)
        requests = [asking(f"request-{number}") for number in range(20)]
        create = asyncio.create_task(client.messages.batches.create(requests=requests))
        for _ in range(200):  # until it waits
            await asyncio.sleep(0)
        goes_on.set()
        assert (await create).processing_status == "in_progress"
        assert all(await asyncio.gather(*others))


async def test_results_are_made_beside_the_loop_and_sent_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 50 000 requests, made one by one on the loop, would hold up every stream of chat for seconds."""
    made_by = set()

    def noting(line: dict[str, Any]) -> dict[str, Any]:
        made_by.add(threading.current_thread())
        return result_view(line)

    monkeypatch.setattr(message_batches, "result_view", noting)
    async with batch_gateway(tmp_path, saying("the dog")) as served, sdk_of(served.app) as client:
        requests = [asking(f"request-{number}") for number in range(20)]
        batch = await ended(client, await client.messages.batches.create(requests=requests))
        sent = await answered(served.app, f"/v1/messages/batches/{batch.id}/results")
    bodies = [message["body"] for message in sent if message.get("body")]
    assert [body.count(b"\n") for body in bodies] == [20]
    assert threading.current_thread() not in made_by


async def test_results_lie_behind_the_proxy_that_the_client_came_by(tmp_path: Path) -> None:
    config = GatewayConfig(host_names=("llm.example",))
    async with batch_gateway(tmp_path, gateway_config=config) as served, sdk_of(served.app) as client:
        batch = await ended(client, await client.messages.batches.create(requests=[asking("a")]))
        path, headers = f"/v1/messages/batches/{batch.id}", {"x-forwarded-proto": "https", "host": "llm.example"}
        shown = (await served.client.get(path, headers=headers)).json()
    assert (batch.results_url, shown["results_url"]) == (
        f"http://localhost{path}/results",
        f"https://llm.example{path}/results",
    )


async def test_requests_of_batches_that_are_over_take_no_place(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, max_files=2) as served, sdk_of(served.app) as client:
        for _ in range(4):
            await ended(client, await client.messages.batches.create(requests=[asking("a")]))
    async with batch_gateway(tmp_path / "refusing", is_driven=False, max_files=2, max_active=1) as served:
        bodies = [{"model": "tiny", "input": "hello", "background": True}] * 5
        answers = [await served.client.post("/v1/responses", json=body) for body in bodies]
        assert all("batches that are not over" in answer.text for answer in answers[1:])


async def test_messages_are_lines_of_other_batches_too(tmp_path: Path) -> None:
    line = (
        b'{"custom_id":"a","method":"POST","url":"/v1/messages","body":{"model":"tiny","max_tokens":9,"messages":[]}}'
    )
    good = line.replace(b"[]", b'[{"role":"user","content":"hello"}]')
    async with batch_gateway(tmp_path) as served:
        made = await served.submit(good + b"\n" + line.replace(b'"a"', b'"b"'), endpoint="/v1/messages")
        done = await served.wait_for(made["id"])
        (message,) = await served.results(done["output_file_id"])
        (failure,) = await served.results(done["error_file_id"])
    assert '"type":"message"' in message
    assert '"invalid_request_error"' in failure

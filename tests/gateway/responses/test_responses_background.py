"""Responses in the background: run by the driver of batches, polled, cancelled, continued; and lines of batches."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.api.errors import Unservable
from alignedserve.batches.log.disk_log import DiskLogs
from alignedserve.core.request import RequestClass
from alignedserve.gateway.files.files_api import FilesApi
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually
from tests.gateway.responses.responses_support import events_of, response_of, text_of
from tests.gateway.support import error_of, saying, tokenizer
from tests.harnesses.scripted_backend import Script
from tests.support.waiting import holds


async def begin(served: BatchGateway, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "hello", "background": True, **fields}
    response = response_of(await served.client.post("/v1/responses", json=body))
    assert (response["status"], response["background"]) == ("queued", True)
    return response


async def get(served: BatchGateway, name: str) -> dict[str, Any]:
    return response_of(await served.client.get(f"/v1/responses/{name}"))


async def reached(served: BatchGateway, name: str, *statuses: str) -> dict[str, Any]:
    async def is_there() -> bool:
        return (await get(served, name))["status"] in statuses

    await eventually(is_there)
    return await get(served, name)


async def post(served: BatchGateway, path: str) -> httpx.Response:
    return await served.client.post(f"/v1/responses/{path}")


async def test_it_is_generated_at_best_effort_and_kept(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        queued = await begin(served, metadata={"run": "7"}, seed=3)
        done = await reached(served, queued["id"], "completed")
        [request] = served.backend.submitted
        assert (request.request_class, request.sampling.seed) == (RequestClass.BEST_EFFORT, 3)
        assert (text_of(done), done["metadata"], done["usage"]["output_tokens"]) == ("hello world", {"run": "7"}, 3)
        assert done["id"].removeprefix("resp_") in done["output"][0]["id"]
        listed = [(await served.client.get(path)).json()["data"] for path in ("/v1/files", "/v1/batches")]
        assert listed == [[], []]
        await holds(lambda: not any((tmp_path / "files").rglob("file-*")))  # what only the batch needed goes after it
        assert await get(served, queued["id"]) == done


async def test_options_of_its_stream_are_none_of_its_line(tmp_path: Path) -> None:
    body = {"model": "tiny", "input": "hello", "background": True, "stream": True}
    async with batch_gateway(tmp_path) as served:
        answer = await served.client.post(
            "/v1/responses", json=body | {"stream_options": {"include_obfuscation": False}}
        )
    assert text_of(events_of(answer)[-1]["response"]) == "hello world"


async def test_a_new_driver_goes_on(tmp_path: Path) -> None:
    goes_on = asyncio.Event()
    async with batch_gateway(tmp_path, saying("hello world", held_until=goes_on)) as served:
        queued = await begin(served)
        await reached(served, queued["id"], "in_progress")
        await served.stop_driver()
        goes_on.set()
        served.start_driver()
        assert text_of(await reached(served, queued["id"], "completed")) == "hello world"


async def test_it_continues_and_is_continued(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        first = response_of(await served.client.post("/v1/responses", json={"model": "tiny", "input": "one"}))
        queued = await begin(served, input="two", previous_response_id=first["id"])
        await reached(served, queued["id"], "completed")
        body = {"model": "tiny", "input": "three", "previous_response_id": queued["id"]}
        response_of(await served.client.post("/v1/responses", json=body))
    prompt = tokenizer().decode(served.backend.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count("<|assistant|>hello world<|end|>") == 2
    assert [word in prompt for word in ("one", "two", "three")] == [True] * 3


async def test_one_that_is_not_over_cannot_be_continued_but_cancelled(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = (await begin(served))["id"]
        body = {"model": "tiny", "input": "more", "previous_response_id": name}
        error = error_of(await served.client.post("/v1/responses", json=body), 400)
        assert error["code"] == "previous_response_in_progress"
        assert response_of(await post(served, f"{name}/cancel"))["status"] == "cancelled"
        assert response_of(await post(served, f"{name}/cancel"))["status"] == "cancelled"
        assert (await get(served, name))["status"] == "cancelled"
        served.start_driver()
        assert served.backend.submitted == []


async def test_all_who_ask_at_once_when_it_is_over_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on, plain = [False], asyncio.Event(), DiskLogs.chunks

    async def chunks(logs: DiskLogs, *arguments: Any) -> AsyncIterator[bytes]:
        if not is_held[0]:
            is_held[0] = True
            await goes_on.wait()
        async for chunk in plain(logs, *arguments):
            yield chunk

    async with batch_gateway(tmp_path) as served:
        name = (await begin(served))["id"]

        async def is_over() -> bool:
            return bool(await served.stores.repository.oldest_over(1))

        await eventually(is_over)
        monkeypatch.setattr(DiskLogs, "chunks", chunks)
        late = asyncio.create_task(get(served, name))
        await holds(lambda: is_held[0])
        first = await get(served, name)  # after which the batch has no files any more
        goes_on.set()
        assert text_of(await late) == text_of(first) == "hello world"
        assert await get(served, name) == first


async def test_one_that_ends_while_it_is_cancelled_keeps_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, goes_on, num_looks, plain = asyncio.Event(), asyncio.Event(), [0], FilesApi.batch

    async def batch(files_api: FilesApi, owner: str, text: str) -> Any:
        found = await plain(files_api, owner, text)
        num_looks[0] += 1
        if num_looks[0] == 2:  # that of the cancellation itself
            await goes_on.wait()
        return found

    async with batch_gateway(tmp_path, saying("hello world", held_until=ends)) as served:
        name = (await begin(served))["id"]
        await reached(served, name, "in_progress")
        monkeypatch.setattr(FilesApi, "batch", batch)
        cancelling = asyncio.create_task(post(served, f"{name}/cancel"))
        await holds(lambda: num_looks[0] == 2)
        ends.set()
        done = await reached(served, name, "completed")
        goes_on.set()
        assert response_of(await cancelling) == await get(served, name) == done


async def test_a_deleted_one_is_not_generated(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, saying("hello world", first_token_delay_s=30.0)) as served:
        name = (await begin(served))["id"]
        await reached(served, name, "in_progress")
        assert (await served.client.delete(f"/v1/responses/{name}")).json()["deleted"]

        async def is_aborted() -> bool:
            return len(served.backend.aborted) == len(served.backend.submitted)

        await eventually(is_aborted)
        error_of(await served.client.get(f"/v1/responses/{name}"), 404)


async def test_a_failure_is_shown(tmp_path: Path) -> None:
    script = Script((), failure=Unservable("It never fits."))
    async with batch_gateway(tmp_path, lambda _: script) as served:
        failed = await reached(served, (await begin(served))["id"], "failed")
    assert failed["error"] == {"code": "server_error", "message": "It never fits."}


async def test_what_cannot_run_is_refused_at_once(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        for fields, param in (
            ({"temperature": 9.0}, "temperature"),
            ({"service_tier": "priority"}, "service_tier"),
            ({"max_output_tokens": 9999}, "input"),
        ):
            body = {"model": "tiny", "input": "hello", "background": True, **fields}
            assert error_of(await served.client.post("/v1/responses", json=body), 400)["param"] == param
        headers = {"x-slo-ttft-ms": "100"}
        body = {"model": "tiny", "input": "hello", "background": True}
        error_of(await served.client.post("/v1/responses", json=body, headers=headers), 400)


def line(custom_id: str, **fields: Any) -> bytes:
    body = {"model": "tiny", "input": "hello", **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}).encode() + b"\n"


async def test_lines_of_batches_are_responses(tmp_path: Path) -> None:
    content = line("a") + line("b", store=True) + line("c", stream=True) + line("d", mood=1)
    async with batch_gateway(tmp_path) as served:
        batch = await served.submit(content, endpoint="/v1/responses")
        over = await served.wait_for(batch["id"])
        results = [json.loads(text) for text in await served.results(over["output_file_id"])]
        errors = [json.loads(text) for text in await served.results(over["error_file_id"])]
    found = {result["custom_id"]: result["response"]["body"] for result in results}
    assert {name: text_of(body) for name, body in found.items()} == {"a": "hello world", "d": "hello world"}
    assert (found["a"]["store"], found["d"]["alignedserve"]) == (False, {"ignored_fields": ["mood"]})
    params = {error["custom_id"]: error["response"]["body"]["error"]["param"] for error in errors}
    assert params == {"b": "store", "c": "stream"}

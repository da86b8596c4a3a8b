"""What answers tell of tokens is what /v1/usage tells, for chats and for batches, after a restart too."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.core.request import Request
from alignedserve.gateway.routes import usage
from alignedserve.usage.records import UsageResult, grouped
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.support import EOS, chunks_of, error_of, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.waiting import holds

HELD = 200  # max_tokens of the answer whose second half is held back


async def usage_of(served: BatchGateway, **query: Any) -> list[dict[str, Any]]:
    """Return the results by their groups, of all buckets together: an hour may end in the midst of a test."""
    asked = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by": "key,model,class", **query}
    answer = await served.client.get("/v1/usage", params=asked)
    assert answer.status_code == 200, answer.text
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in (one for bucket in answer.json()["data"] for one in bucket["results"]):
        counts = {name: value for name, value in result.items() if isinstance(value, int | float)}
        group = {name: value for name, value in result.items() if name not in counts}
        known = found.setdefault(tuple(group.values()), group)
        known |= {name: known.get(name, 0) + value for name, value in counts.items()}
    return list(found.values())


async def test_usage_is_the_sum_of_the_answers(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        served.services.usage.is_kept = True
        told = []
        for _ in range(3):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            told.append((await served.client.post("/v1/chat/completions", json=body)).json()["usage"])
        batch = await served.wait_for((await served.submit())["id"])
        found = {one["class"]: one for one in await usage_of(served)}
        metrics = (await served.client.get("/metrics")).text
    chat, lines = found["real_time"], found["batch"]
    assert chat["num_model_requests"] == 3
    assert chat["input_tokens"] == sum(usage["prompt_tokens"] for usage in told)
    assert chat["output_tokens"] == sum(usage["completion_tokens"] for usage in told)
    assert lines["num_model_requests"] == batch["request_counts"]["completed"] == 3
    assert lines["output_tokens"] == batch["usage"]["output_tokens"]
    assert (chat["key"], chat["model"]) == ("anyone", "tiny")
    assert 'alignedserve_key_requests_total{class="real_time",key="anyone",model_name="tiny"} 3.0' in metrics


async def test_streams_go_on_while_a_long_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    def waiting(*arguments: Any, **named: Any) -> list[UsageResult]:
        has_begun.set()
        assert goes_on.wait(5), "nothing else was answered"
        return grouped(*arguments, **named)

    monkeypatch.setattr(usage, "grouped", waiting)
    async with batch_gateway(tmp_path) as served:
        page = asyncio.create_task(usage_of(served, start_time=0, limit=744))
        await holds(has_begun.is_set)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        assert (await served.client.post("/v1/chat/completions", json=body)).text.endswith("data: [DONE]\n\n")
        goes_on.set()
        assert await page == []


async def test_usage_is_exact_over_all_that_goes_on_at_once(tmp_path: Path) -> None:
    """Streams and whole answers, several choices, stop strings, clients that leave, and a batch."""
    held, words = asyncio.Event(), tokens_of("hello world, how are you today?")

    def script(request: Request) -> Script:
        is_held = request.sampling.max_tokens == HELD
        return Script((*words, EOS), compute_s=0.25, num_cached_tokens=2, held_until=held if is_held else None)

    async with batch_gateway(tmp_path, script) as served, listening(served.app) as url:
        served.services.usage.is_kept = True
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            batch = await served.submit()
            left = await leave_in_the_middle(client)
            answers = await asyncio.gather(
                *(chat(client, n=n, **fields) for n in (1, 3) for fields in ({}, {"stop": "how"}, {"max_tokens": 3})),
                *(streamed(client, n=n, **fields) for n in (1, 2) for fields in ({}, {"stop": "how"})),
            )
            held.set()
            batch = await served.wait_for(batch["id"])
            found = {one["class"]: one for one in await usage_of(served)}
    chats, lines = found["real_time"], found["batch"]
    told = [left, *answers]
    assert chats["num_model_requests"] == len(told)
    assert chats["input_tokens"] == sum(usage["prompt_tokens"] for usage in told)
    assert chats["input_cached_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    assert chats["output_tokens"] == sum(usage["completion_tokens"] for usage in told)
    assert chats["compute_seconds"] == 0.25 * (1 + 3 * (1 + 3) + 2 * (1 + 2))
    assert lines["output_tokens"] == batch["usage"]["output_tokens"] == 3 * (len(words) + 1)
    assert lines["compute_seconds"] == batch["alignedserve"]["compute_seconds"] == 0.25 * 3


async def chat(client: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
    return (await client.post("/v1/chat/completions", json=body)).json()["usage"]


async def streamed(client: httpx.AsyncClient, **fields: Any) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **options, **fields}
    return chunks_of(await client.post("/v1/chat/completions", json=body))[-1]["usage"]


async def leave_in_the_middle(client: httpx.AsyncClient) -> Any:
    """Stream up to the half that is held back, and close; what had been told of usage by then."""
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": HELD, **options}
    last, half = None, (len(tokens_of("hello world, how are you today?")) + 2) // 2
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))["usage"]
                if last["completion_tokens"] == half:
                    break
    return last


async def test_a_batch_whose_driver_dies_is_counted_once(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        created = await served.submit()
        for _ in range(3):
            await served.stop_driver()
            served.start_driver()
        done = await served.wait_for(created["id"])
        found = await usage_of(served, group_by="class")
    assert [one["output_tokens"] for one in found] == [done["usage"]["output_tokens"]]


async def test_bad_questions_are_named(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        for query, param in (
            ("", "start_time"),
            ("start_time=x", "start_time"),
            ("start_time=1&limit=0", "limit"),
            ("start_time=1&group_by=owner", "group_by"),
            ("start_time=1&bucket_width=1m", "bucket_width"),
            ("start_time=7200&end_time=3600", "end_time"),
        ):
            assert error_of(await served.client.get(f"/v1/usage?{query}"), 400)["param"] == param

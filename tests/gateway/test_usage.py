"""What answers tell of tokens is what /v1/usage tells, for chats and for batches, after a restart too."""

import time
from pathlib import Path
from typing import Any

from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.support import error_of


async def usage_of(served: BatchGateway, **query: Any) -> list[dict[str, Any]]:
    asked = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by": "key,model,class", **query}
    answer = await served.client.get("/v1/usage", params=asked)
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


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
        ):
            assert error_of(await served.client.get(f"/v1/usage?{query}"), 400)["param"] == param

"""GET /v1/alignedserve/live: what a cluster does, for the live page and `alignedserve top`."""

import asyncio
from typing import Any

from alignedserve.api.errors import ClientDisconnected, GenerationFailed
from alignedserve.api.openai.generation import cause_of
from alignedserve.messages.request_notes import Cause
from tests.gateway.monitoring.live_samples import BUSY_STATUS
from tests.gateway.support import Gateway, gateway, saying
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each
from tests.support.waiting import holds

LIVE = "/v1/alignedserve/live"
SILENT = Script((5,), first_token_delay_s=60.0)
STUCK = Script((5,) * 9, token_delay_s=60.0)


async def model_of(served: Gateway) -> dict[str, Any]:
    response = await served.client.get(LIVE)
    assert response.headers["cache-control"] == "no-store"
    (model,) = response.json()["models"]
    assert isinstance(model, dict)
    return model


async def test_what_the_router_reports_is_shown_by_name() -> None:
    async with gateway() as served:
        served.backend.set_status(BUSY_STATUS)
        model = await model_of(served)
    load = model["load"]
    assert model["name"] == "tiny"
    assert load["tiers"]["best_effort"] == {
        "num_queued": 9,
        "num_prefilling": 0,
        "num_pooled": 3,
        "num_decoding": 2,
        "oldest_queued_s": 30.0,
    }
    assert [one["worker"] for one in load["workers"]] == ["decode-0", "prefill-0"]
    assert load["workers"][0]["batch"] == {"num_requests": 6, "shortest": 120, "mean_len": 150.5, "longest": 200}
    assert load["trees"][0]["place"] == "pool-0"
    assert load["trees"][0]["tree"]["formed"]["worker"] == "decode-0"
    assert load["time"]["wall_s"] == 8.0
    assert load["totals"]["num_tokens"] == 900
    assert load["pool"] == {"num_blocks": 64, "num_blocks_used": 48, "num_blocks_kept": 0}


async def test_without_a_router_the_reason_is_shown_instead() -> None:
    async with gateway() as served:
        served.backend.set_status(None)
        document = (await served.client.get(LIVE)).json()
    (model,) = document["models"]
    assert model["load"] is None
    assert "the router is not connected" in model["problem"]
    assert "the router is not connected" in document["not_ready"]
    assert (document["has_batches"], document["batches"]) == (False, None)


async def test_objectives_are_counted_by_class_and_outcome() -> None:
    headers = {"x-slo-ttft-ms": "3600000", "x-slo-tpot-ms": "0.000001"}
    async with gateway(saying("the quick brown", token_delay_s=0.001)) as served:
        await served.chat()  # names none
        await served.chat(headers=headers)
        await served.chat(headers={"x-slo-deadline-ms": "3600000"}, service_tier="flex")
        objectives = (await model_of(served))["objectives"]
        text = (await served.client.get("/metrics")).text
    assert objectives == [
        {"tier": "best_effort", "objective": "deadline", "held": 1, "missed": 0},
        {"tier": "real_time", "objective": "tpot", "held": 0, "missed": 1},
        {"tier": "real_time", "objective": "ttft", "held": 1, "missed": 0},
    ]
    counted = 'alignedserve_objectives_total{{model_name="tiny",objective="tpot",outcome="{}",tier="real_time"}} {}'
    assert counted.format("missed", "1.0") in text
    assert counted.format("held", "0.0") in text


async def test_a_request_that_fails_has_missed_its_objectives() -> None:
    async with gateway(lambda _: Script((), failure=GenerationFailed("a fault"))) as served:
        await served.chat(headers={"x-slo-ttft-ms": "3600000"})
        objectives = (await model_of(served))["objectives"]
    assert objectives == [{"tier": "real_time", "objective": "ttft", "held": 0, "missed": 1}]


async def test_a_request_that_finds_no_place_has_missed_its_objectives() -> None:
    async with gateway(lambda _: SILENT, max_concurrent_requests=1) as served:
        holding = asyncio.create_task(served.chat())
        await holds(lambda: len(served.backend.submitted) == 1)
        assert (await served.chat(headers={"x-slo-ttft-ms": "3600000"})).status_code == 503
        objectives = (await model_of(served))["objectives"]
        text = (await served.client.get("/metrics")).text
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
    assert objectives == [{"tier": "real_time", "objective": "ttft", "held": 0, "missed": 1}]
    assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0' in text


@each(
    ("script", "targets_ms", "held", "missed"),
    [
        (SILENT, {"ttft": 0.001, "tpot": 60_000}, [], ["ttft"]),
        (SILENT, {"ttft": 60_000, "deadline": 0.001}, [], ["deadline"]),
        (SILENT, {"ttft": 60_000, "deadline": 60_000}, [], []),
        (STUCK, {"ttft": 60_000, "tpot": 60_000}, ["ttft"], []),
        (STUCK, {"ttft": 0.001, "tpot": 0.001}, [], ["tpot", "ttft"]),
    ],
)
async def test_a_client_that_gave_up_has_missed_what_it_waited_for_too_long(
    script: Script, targets_ms: dict[str, float], held: list[str], missed: list[str]
) -> None:
    async with gateway(lambda _: script) as served:
        headers = {f"x-slo-{name}-ms": str(target_ms) for name, target_ms in targets_ms.items()}
        asking = asyncio.create_task(served.chat(headers=headers))
        counts = served.services.find_model(None).metrics.tbt_s
        await holds(lambda: counts.num_tokens == (script is STUCK) and len(served.backend.submitted) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        counted = (await model_of(served))["objectives"]
        text = (await served.client.get("/metrics")).text
    assert [one["objective"] for one in counted if one["held"]] == held
    assert [one["objective"] for one in counted if one["missed"]] == missed
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in text


def test_a_client_that_reads_no_more_is_no_failure_of_the_server() -> None:
    assert cause_of(ClientDisconnected("it does not read")) is Cause.CLIENT_GONE


async def test_times_to_the_first_token_are_counted_up_to_each_edge() -> None:
    async with gateway() as served:
        await served.chat()
        ttft = (await model_of(served))["ttft"]
    assert len(ttft["counts"]) == len(ttft["edges"]) + 1
    assert ttft["counts"] == sorted(ttft["counts"])
    assert ttft["counts"][-1] == 1


async def test_nothing_of_a_request_is_shown() -> None:
    async with gateway() as served:
        await served.chat(user="somebody", messages=[{"role": "user", "content": "a secret word"}])
        text = (await served.client.get(LIVE)).text
    assert "secret" not in text
    assert "somebody" not in text
    assert not any(request.request_id in text for request in served.backend.submitted)

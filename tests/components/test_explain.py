"""A request is explained: live, after its end, at any gateway, to its key alone; and traced across processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import ExplainConfig, Observing, RouterConfig, Topology, TracingConfig
from tests.components.explained import Explained, explained
from tests.support.servers.otlp_receiver import collecting
from tests.support.waiting import holds, holds_async

pytestmark = pytest.mark.slow

ELASTIC = Topology.ELASTIC
PARENT = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "vendor=1"}


async def _whole(cluster: Explained, wanted: str, **fields: Any) -> dict[str, Any]:
    """Return the explanation once it says that it is complete."""
    found: dict[str, Any] = {}

    async def is_whole() -> bool:
        response = await cluster.explain(wanted, **fields)
        assert response.status_code == 200, response.text
        found.update(response.json())
        return bool(found["complete"])

    await holds_async(is_whole)
    return found


async def test_the_course_of_a_request_is_told_by_phases_without_a_gap(tmp_path: Path) -> None:
    async with explained(tmp_path, topology=ELASTIC) as cluster:
        answer = await cluster.complete(headers={"x-request-id": "mine-1", "x-slo-ttft-ms": "60000"})
        told = await _whole(cluster, answer["id"])
        by_own_id = (await cluster.explain("mine-1")).json()
    choice = told["choices"][0]
    assert (told["state"], told["client_request_id"], by_own_id["id"]) == ("ended", "mine-1", answer["id"])
    assert (choice["output_tokens"], choice["finish_reason"]) == (6, "length")
    assert choice["objectives"][0]["held"] is True
    names = [phase["name"] for phase in choice["phases"]]
    assert [name for name in names if name in ("tokenise", "prefill", "decode", "stream end")] == [
        "tokenise",
        "prefill",
        "decode",
        "stream end",
    ]
    total_ms = sum(phase["duration_ms"] for phase in choice["phases"])
    assert total_ms == pytest.approx(choice["duration_ms"], abs=0.1)
    assert {phase["where"] for phase in choice["phases"]} == {"gateway-1", "router", "decode-0"}


async def test_any_gateway_explains_a_request_to_the_key_that_made_it(tmp_path: Path) -> None:
    ours, theirs = {"authorization": "Bearer ours"}, {"authorization": "Bearer theirs"}
    async with explained(tmp_path, num_gateways=2, api_keys=("ours", "theirs"), topology=ELASTIC) as cluster:
        answer = await cluster.complete(headers=ours)
        told = await _whole(cluster, answer["id"], gateway=1, headers=ours)
        for gateway in range(2):
            others = await cluster.explain(answer["id"], gateway=gateway, headers=theirs)
            assert others.status_code == 404
            assert others.json()["error"]["code"] == "request_not_found"
        unknown = await cluster.explain("chatcmpl-unknown", headers=ours)
    assert told["gateway"] == "gateway-1"
    assert unknown.status_code == 404


async def test_separate_workers_explain_the_wait_in_the_pool(tmp_path: Path) -> None:
    async with explained(tmp_path) as cluster:
        answer = await cluster.complete()
        told = await _whole(cluster, answer["id"])
    phases = {phase["name"]: phase for phase in told["choices"][0]["phases"]}
    assert phases["prefill"]["where"] == "prefill-0"
    assert phases["decode"]["where"] == "decode-0"
    assert phases["pool"]["is_wait"] is True
    assert [reason["cause"] for reason in phases["pool"]["reasons"]] == ["batch not full"]


async def test_a_trace_has_the_spans_of_every_process_under_the_clients(tmp_path: Path) -> None:
    with collecting() as collector:
        tracing = TracingConfig(endpoint=collector.url)
        observing = Observing(ExplainConfig(), tracing, (("x-key", "secret"),))
        async with explained(tmp_path, observing=observing, topology=ELASTIC) as cluster:
            answer = await cluster.complete(headers={**PARENT, "x-request-id": "mine-1"})
            await holds(lambda: bool(collector.spans))
        spans = collector.spans
    root = next(one for one in spans if one.span.name == "text_completion model")
    assert (root.span.trace_id.hex(), root.span.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert root.span.trace_state == "vendor=1"
    assert root.instance == "gateway-1"
    attributes = root.attributes
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["http.request.header.x-request-id"] == ["mine-1"]
    children = [one for one in spans if one is not root]
    assert {one.span.parent_span_id for one in children} == {root.span.span_id}
    assert {one.span.trace_id for one in spans} == {root.span.trace_id}
    where = {one.span.name: one.instance for one in children}
    assert where.items() >= {("tokenise", "gateway-1"), ("prefill", "decode-0"), ("decode", "decode-0")}
    assert all(
        root.span.start_time_unix_nano <= one.span.start_time_unix_nano <= one.span.end_time_unix_nano
        for one in children
    )
    assert "hello" not in str(spans)
    assert collector.headers[0]["x-key"] == "secret"


async def test_clients_that_do_not_want_a_trace_get_none(tmp_path: Path) -> None:
    with collecting() as collector:
        observing = Observing(ExplainConfig(), TracingConfig(endpoint=collector.url))
        async with explained(tmp_path, observing=observing, topology=ELASTIC) as cluster:
            await cluster.complete(headers={"traceparent": PARENT["traceparent"][:-1] + "0"})
            wanted = await cluster.complete()
            await holds(lambda: bool(collector.named("text_completion model")))  # a gateway's end waits two seconds
        responses = [one.attributes.get("gen_ai.response.id") for one in collector.named("text_completion model")]
    assert responses == [wanted["id"]]


async def test_a_waiting_request_is_told_its_place_and_when_it_is_likely_to_start(tmp_path: Path) -> None:
    flex: Any = {"service_tier": "flex", "prompt": ["hello world " * 16] * 16, "max_tokens": 8}
    few = RouterConfig(max_prefill_tokens_per_worker=32)
    async with explained(tmp_path, num_gateways=2, router=few) as cluster:
        bodies = [cluster.complete(headers={"x-request-id": f"mine-{number}"}, **flex) for number in range(12)]
        waiting = [asyncio.create_task(body) for body in bodies]
        found: dict[str, Any] = {}

        async def is_estimated() -> bool:
            response = await cluster.explain("mine-11", gateway=1)  # it was made at the other one
            standing = response.json()["choices"][15]["standing"] if response.status_code == 200 else None
            found.update(standing or {})
            return found.get("start_in_ms") is not None

        await holds_async(is_estimated)
        await asyncio.gather(*waiting)
        ended = (await cluster.explain("mine-11")).json()
    assert (found["stage"], found["where"]) == ("queued", "router")
    assert found["position"] > 1
    assert found["start_in_ms"] > 0.0
    assert found["text"].startswith(f"number {found['position']} in the queue")
    assert (ended["state"], ended["choices"][15]["standing"]) == ("ended", None)

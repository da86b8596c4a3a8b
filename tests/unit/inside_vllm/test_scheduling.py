"""How the queues lie for a step, on recorded states of them: the plan is our core's, the layout is vLLM's."""

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Slo
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.online import OnlineIterationModel
from benchmarks.vllm.stand_ins import FCFS, StandInOutput, StandInRequest, StandInScheduler
from plugins.vllm import names
from plugins.vllm.names import Layout
from plugins.vllm.scheduling import Planner

COSTS = LinearCoefficients(base_s=0.01, prompt_token_s=0.001, decode_s=0.001)
NOW, WALL = 1000.0, 5000.0


@pytest.fixture(autouse=True)
def _wall_clock() -> Iterator[None]:
    with mock.patch.object(time, "time", return_value=WALL):
        yield


def chat(name: str, prompt: int, *, computed: int = 0, out: int = 0, age: float = 0.1, **fields: Any) -> StandInRequest:
    return _request(name, prompt, computed, out, age, {"slo_ttft_ms": 400, "slo_tpot_ms": 100}, fields)


def document(
    name: str, prompt: int, *, computed: int = 0, out: int = 0, age: float = 5.0, **fields: Any
) -> StandInRequest:
    return _request(name, prompt, computed, out, age, {"service_class": "document"}, fields)


def _request(
    name: str, prompt: int, computed: int, out: int, age: float, xargs: dict[str, Any], fields: dict[str, Any]
) -> StandInRequest:
    fields = {"xargs": xargs, "status": "RUNNING" if computed else "WAITING", "arrival_time": WALL - age, **fields}
    made = StandInRequest(name, prompt, **fields)
    made.num_computed_tokens, made.num_output_tokens = computed, out
    return made


def planner_of(*requests: StandInRequest, num_blocks: int = 1000, max_loras: int = 0) -> Planner:
    scheduler = StandInScheduler(*requests, num_blocks=num_blocks, max_loras=max_loras)
    return Planner(scheduler, Slo(1.0, 0.2), costs=OnlineIterationModel(COSTS))


def laid(planner: Planner, now: float = NOW) -> Layout:
    layout = planner.lay_out(now)
    assert layout is not None
    return layout


def ids(requests: list[StandInRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_chat_goes_first_and_a_document_takes_what_is_left_of_the_step() -> None:
    planner = planner_of(document("d", 500, computed=100), chat("c", 50, computed=50, out=1), chat("new", 60))
    layout = laid(planner)
    plan = planner._plan
    assert plan is not None
    tokens = [(planner.table.request_ids[part.row], part.num_tokens) for part in plan.scheduled]
    assert tokens[0] == ("c", 1)
    assert ("new", 60) in tokens
    assert ids(layout.newcomers) == ["new"]
    assert ids(layout.running)[0] == "c"
    assert 61 <= layout.num_tokens <= 80  # 0.2 of a TTFT of 400 ms is a step of 80 ms


def test_documents_sit_out_a_step_that_chats_need() -> None:
    documents = [document(f"d{number}", 100, computed=100, out=1) for number in range(60)]
    planner = planner_of(*documents, chat("c", 50, computed=50, out=1), chat("new", 60))
    layout = laid(planner)
    assert len(layout.held) > 40
    assert all(name.startswith("d") for name in ids(layout.held))
    assert set(ids(layout.running)) | set(ids(layout.held)) == set(planner.scheduler.requests) - {"new"}


def test_alone_documents_have_the_whole_step() -> None:
    planner = planner_of(*(document(f"d{number}", 300) for number in range(4)))
    layout = laid(planner)
    assert ids(layout.newcomers) == ["d0", "d1", "d2", "d3"]
    assert layout.num_tokens == 1200


def test_requests_that_say_nothing_are_chats_and_a_priority_above_nothing_is_a_document() -> None:
    planner = planner_of(StandInRequest("silent", 10), StandInRequest("low", 10, priority=3))
    laid(planner)
    kinds = dict(zip(planner.table.request_ids, planner.table.is_real_time.tolist(), strict=True))
    assert kinds == {"silent": True, "low": False}
    assert planner.table.ttft_s[planner.table.row(RequestId("silent"))] == 1.0


def test_a_chat_without_memory_takes_it_from_a_document_by_vllms_own_preemption() -> None:
    documents = [document(f"d{number}", 160, computed=160, out=1) for number in range(4)]
    planner = planner_of(*documents, chat("new", 100), num_blocks=44)
    layout = laid(planner)
    assert planner.scheduler.preempted
    assert planner.scheduler.preempted[0] not in ids([*layout.running, *layout.held])
    assert ids(layout.newcomers) == ["new"]


def test_a_preempted_request_comes_back_when_its_output_has_arrived() -> None:
    planner = planner_of(document("d", 100, computed=100, out=3))
    laid(planner)
    request = planner.scheduler.requests["d"]
    request.num_stale_output_tokens = 1
    names.preempt(planner.scheduler, request, NOW)
    planner.scheduled(StandInOutput({}, frozenset({"d"})), NOW)
    assert RequestId("d") not in planner.table
    assert ids(laid(planner).newcomers) == ["d"]  # vLLM looks whether it is ready
    request.num_stale_output_tokens, request.num_output_tokens = 0, 4
    laid(planner)
    assert planner.table.num_generated[planner.table.row(RequestId("d"))] == 4


def test_a_request_whose_last_token_is_in_flight_needs_no_step() -> None:
    planner = planner_of(chat("c", 20, computed=21, out=1, max_tokens=2))
    planner.scheduler.requests["c"].num_output_placeholders = 1
    layout = laid(planner)
    assert (ids(layout.running), layout.num_tokens, len(planner.table)) == (["c"], 0, 0)


def test_steps_teach_the_costs_and_note_first_tokens() -> None:
    planner = planner_of(chat("c", 40))
    laid(planner)
    request = planner.scheduler.requests["c"]
    request.status.name, request.num_computed_tokens, request.num_output_placeholders = "RUNNING", 40, 1
    output = StandInOutput({"c": 40})
    planner.scheduled(output, NOW)
    planner.completed(output, NOW + 0.25)
    assert planner.costs.num_observed == 1
    row = planner.table.row(RequestId("c"))
    assert planner.table.first_token_s[row] == NOW + 0.25
    assert planner.table.num_cached[row] == 40
    assert planner.table.num_generated[row] == 1


def test_a_long_step_in_flight_is_waited_for_while_chats_are_here() -> None:
    planner = planner_of(document("d", 2000), chat("c", 30))
    laid(planner)
    planner.scheduled(StandInOutput({"c": 30, "d": 100}), NOW)
    assert laid(planner, NOW + 0.01).num_tokens == 0
    assert laid(planner, NOW + 0.12).num_tokens > 0


def test_a_plan_that_vllm_cannot_follow_gives_the_next_step_to_vllm() -> None:
    planner = planner_of(chat("c", 30))
    for _ in range(2):
        laid(planner)
        planner.scheduled(StandInOutput({}), NOW)
    assert planner.lay_out(NOW) is None
    planner.scheduled(StandInOutput({"c": 30}), NOW)
    assert planner.lay_out(NOW + 1.0) is not None


def test_no_more_adapters_compute_than_vllm_holds() -> None:
    def adapter(number: int) -> object:
        return type("Lora", (), {"lora_int_id": number})

    running = [chat(f"c{number}", 20, computed=20, out=1, lora_request=adapter(number)) for number in (1, 2, 1)]
    for place, request in enumerate(running):
        request.request_id = f"c{place}"
    layout = laid(planner_of(*running, max_loras=1))
    adapters = {request.lora_request.lora_int_id for request in layout.running}
    assert len(adapters) == 1
    assert len(layout.running) + len(layout.held) == 3


def test_queues_are_put_back_with_who_entered_and_who_was_preempted() -> None:
    waiting = [chat(f"w{number}", 10) for number in range(3)]
    scheduler = StandInScheduler(*waiting, chat("r", 10, computed=10, out=1), document("h", 10, computed=10, out=1))
    before, running, held = scheduler.waiting, [scheduler.requests["r"]], [scheduler.requests["h"]]
    layout = Layout(running, [waiting[2], waiting[0]], held, 11, 5)
    with names.laid_out(scheduler, layout):
        assert ids(list(scheduler.waiting)) == ["w2", "w0"]
        assert (scheduler.policy, scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (FCFS, 11, 63)
        assert scheduler.scheduler_config.long_prefill_token_threshold == 5
        scheduler.running.append(scheduler.waiting.popleft())  # vLLM admits one
        scheduler.waiting.appendleft(scheduler.running.pop(0))  # and preempts one
    assert scheduler.waiting is before
    assert ids(list(scheduler.waiting)) == ["r", "w0", "w1"]
    assert ids(scheduler.running) == ["w2", "h"]
    assert (scheduler.policy, scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (
        "priority",
        2048,
        64,
    )
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_a_tenant_that_asks_for_more_waits_longer() -> None:
    tenant = {"service_class": "document", "tenant": "a"}
    flood = [document(f"a{number}", 1000, xargs=tenant) for number in range(5)]
    planner = planner_of(*flood)
    laid(planner)
    for request in flood[:2]:
        planner._begin(planner._tracked[RequestId(request.request_id)])
    other = document("b", 1000, xargs={**tenant, "tenant": "b"})
    planner.scheduler.requests["b"] = other
    planner._sync(NOW)
    tags = {name: known.tag for name, known in planner._tracked.items()}
    assert tags[RequestId("a1")] < tags[RequestId("b")] <= tags[RequestId("a2")] < tags[RequestId("a3")]
    planner.scheduler.requests.clear()
    planner._sync(NOW)
    assert not planner._waiting_cost
    assert not planner.shares.num_waiting


def test_chats_of_a_tenant_far_ahead_give_way() -> None:
    chats = [chat(f"a{number}", 2000, xargs={"tenant": "a"}) for number in range(4)]
    planner = planner_of(*chats, chat("b", 50, xargs={"tenant": "b"}))
    laid(planner)
    priorities = dict(zip(planner.table.request_ids, planner.table.priority.tolist(), strict=False))
    assert priorities == {"a0": 0, "a1": 1, "a2": 1, "a3": 1, "b": 0}

"""vLLM's real scheduler with ours around it, on a virtual clock: what chats hold beside documents."""

from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from alignedserve_vllm import AlignedScheduler
from tests.inside_vllm.tiny_model import TINY, make_model
from tests.inside_vllm.virtual_engine import VirtualEngine, hybrid_load, make_scheduler

XARGS = {"slo_ttft_ms": 1000, "slo_tpot_ms": 300}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {**TINY, "vocab_size": 50272}
    return str(make_model(tmp_path_factory.mktemp("model"), **shape))


def engine_of(scheduler_class: Any, folder: str, **settings: Any) -> VirtualEngine:
    return VirtualEngine(make_scheduler(scheduler_class, folder, **settings))


def load(engine: VirtualEngine, **fields: Any) -> dict[str, float]:
    return hybrid_load(engine, **{"rate": 0.8, "num_documents": 64, "seconds": 60, "xargs": XARGS, **fields})


@pytest.mark.timeout(300)
def test_chats_hold_their_objectives_beside_documents(folder: str) -> None:
    ours = load(engine_of(AlignedScheduler, folder))
    plain = load(engine_of(AsyncScheduler, folder), xargs=None)
    assert ours["held"] >= 0.98
    assert plain["held"] < 0.7
    assert ours["documents_s"] >= plain["documents_s"]


@pytest.mark.timeout(300)
def test_every_request_ends_once_when_memory_is_short(folder: str) -> None:
    engine = engine_of(AlignedScheduler, folder, num_blocks=160)
    load(engine, num_documents=12, seconds=30, rate=1.5)
    engine.run(engine.now + 2000.0)
    chats = [sent for name, sent in engine.sent.items() if name.startswith("c")]
    assert all(sent.request.is_finished() and len(sent.token_s) == sent.request.max_tokens for sent in chats)
    assert engine.scheduler._planner.counters.value("preemptions") > 0


@pytest.mark.timeout(300)
def test_cancelled_requests_leave_nothing_behind(folder: str) -> None:
    from vllm.v1.request import RequestStatus

    engine = engine_of(AlignedScheduler, folder)
    for number in range(8):
        engine.send(0.0, f"c{number}", [5] * 300, 50)
    engine.run(0.5)
    engine.scheduler.finish_requests([f"c{number}" for number in range(4)], RequestStatus.FINISHED_ABORTED)
    engine.run(100.0)
    assert all(len(engine.sent[f"c{number}"].token_s) == 50 for number in range(4, 8))
    planner = engine.scheduler._planner
    planner._sync(engine.now)
    assert not planner.table.request_ids
    assert not planner._tracked


@pytest.mark.timeout(300)
def test_a_tenant_that_floods_waits_behind_the_others(folder: str) -> None:
    engine = engine_of(AlignedScheduler, folder)
    for number in range(60):
        engine.send(0.0, f"flood{number}", [number + 10] * 600, 40, xargs={"service_class": "document", "tenant": "a"})
    for number in range(3):
        engine.send(1.0, f"other{number}", [number + 100] * 600, 40, xargs={"service_class": "document", "tenant": "b"})
    engine.run(1000.0)
    last = max(engine.sent[f"other{number}"].token_s[-1] for number in range(3))
    flood = sorted(engine.sent[f"flood{number}"].token_s[-1] for number in range(60))
    assert last < flood[30]

"""Simulated passes that stop between layers: chat waits for chat alone, and documents lose nothing by it."""

from dataclasses import replace

import msgspec
import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import RequestClass
from benchmarks.promise.chat_beside_documents import CHAT_SLO, config_of, workload_of
from lab.sim.config import SimConfig
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload

DURATION_S, LAYER_S = 30.0, 0.04  # a pass of as many tokens as there may be takes twelve times as long
SHAPES = {
    "elastic": (Topology.ELASTIC, 1, 0),
    "two, elastic": (Topology.ELASTIC, 2, 0),
    "separate": (Topology.DISAGGREGATED, 1, 20_000),
}


def config_with(shape: str, *, yields: bool) -> SimConfig:
    config = config_of(*SHAPES[shape])
    scheduling = msgspec.structs.replace(config.cluster.scheduling, yield_between_layers=yields)
    cluster = msgspec.structs.replace(config.cluster, scheduling=scheduling)
    return replace(config, cluster=cluster, duration_s=DURATION_S)


def workload(num_documents: int, num_chats: int) -> Workload:
    """Return documents that come at once, and chats every 1.3 s, or nearly."""
    description = workload_of(1, 0, 0.0).description
    documents = [TimedRequest(0.0, 600, 100, 100, "documents", RequestClass.BEST_EFFORT)] * num_documents
    chats = [
        TimedRequest(2.0 + 1.3 * at + 0.17 * (at % 7), 100, 10, 10, "chat", slo=CHAT_SLO) for at in range(num_chats)
    ]
    return Workload(description, (*documents, *chats))


def ran(config: SimConfig, *, num_documents: int = 60, num_chats: int = 20) -> SimulationResult:
    return Simulation(config, workload(num_documents, num_chats)).run()


def ttft(result: SimulationResult, percent: int) -> float:
    measure = result.classes["chat"].ttft_s
    assert measure is not None
    return measure.curve[percent]


@pytest.mark.parametrize("shape", SHAPES)
def test_chat_hardly_waits_for_documents(shape: str) -> None:
    off, on = config_with(shape, yields=False), config_with(shape, yields=True)
    alone, beside, stopping = ran(off, num_documents=0), ran(off), ran(on)
    for percent in (50, 90):
        assert ttft(beside, percent) > 1.4 * ttft(alone, percent)
        assert ttft(stopping, percent) < ttft(alone, percent) + LAYER_S
    tokens = [result.classes["documents"].tokens_per_s for result in (beside, stopping)]
    assert tokens[1] > 0.95 * tokens[0]


def test_documents_do_not_starve_under_a_flood_of_chat() -> None:
    documents = [TimedRequest(0.0, 600, 20, 20, "documents", RequestClass.BEST_EFFORT)] * 20
    chats = [TimedRequest(0.2 * at, 150, 1, 1, "chat") for at in range(145)]
    flood = Workload(workload(0, 0).description, (*documents, *chats))
    results = [Simulation(config_with("elastic", yields=yields), flood).run() for yields in (False, True)]
    tokens = [result.classes["documents"].tokens_per_s for result in results]
    assert tokens[1] > 0.9 * tokens[0] > 0.0


def test_nothing_changes_where_no_chat_comes() -> None:
    tokens = [
        ran(config_with("elastic", yields=yields), num_chats=0).classes["documents"].tokens_per_s
        for yields in (False, True)
    ]
    assert tokens[0] == tokens[1]

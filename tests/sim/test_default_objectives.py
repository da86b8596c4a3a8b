"""Default objectives, simulated: chat that names none keeps its pace beside a body of a thousand prompts."""

from dataclasses import replace
from typing import Any

import msgspec

from alignedserve.config.sections import GatewayConfig, SchedulingConfig, Topology
from alignedserve.core.request import RequestClass, Slo
from lab.sim.config import SimConfig
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest
from tests.harnesses.simulation import colocated, timed, workload_of
from tests.support.marks import each

DEFAULT = Slo(ttft_s=1.0, tpot_s=0.15)
NUM_CHAT = 16  # of one body, as many as a chat may have choices: what `CallTerms.request` gives objectives


def _config(**gateway: Any) -> SimConfig:
    base = colocated(1, worker_blocks=4000, max_running_requests=256, policy="aligned_slo", topology=Topology.ELASTIC)
    cluster = msgspec.structs.replace(
        base.cluster, scheduling=SchedulingConfig(policy="aligned_slo"), gateway=GatewayConfig(**gateway)
    )
    return replace(base, cluster=cluster)


def _beside_a_thousand_prompts(slo: Slo, rest: Slo) -> dict[str, ClassResult]:
    """Simulate one chat, and after a second a body of a thousand prompts; `rest`: of those behind the first few."""
    body = [timed(1.0, 12, 16, class_name="body", slo=slo if index < NUM_CHAT else rest) for index in range(1000)]
    requests = [timed(0.0, 60, 200, slo=slo), *body]
    return Simulation(_config(), workload_of(*requests)).run().classes


def test_chat_keeps_its_pace_beside_a_body_of_a_thousand_prompts() -> None:
    classes = _beside_a_thousand_prompts(DEFAULT, Slo())
    chat = classes["chat"]
    assert chat.attainment == 1.0
    assert chat.longest_gap_s is not None
    assert chat.longest_gap_s <= DEFAULT.tpot_s  # type: ignore[operator]  # every gap, not their mean alone
    assert classes["body"].num_by_ending["completed"] == 1000


def test_without_objectives_the_body_stalls_it() -> None:
    stalled = _beside_a_thousand_prompts(Slo(), Slo())["chat"].longest_gap_s
    assert stalled is not None
    assert stalled > 0.25


def _attainment_of_plain_chat(**gateway: Any) -> tuple[bool, bool]:
    """Return whether plain requests of either class had objectives, which nobody can hold."""
    documents: dict[str, Any] = {"class_name": "documents", "request_class": RequestClass.BEST_EFFORT}
    requests: list[TimedRequest] = [timed(0.0, 400, 20, slo=Slo()), timed(0.0, 400, 20, slo=Slo(), **documents)]
    classes = Simulation(_config(**gateway), workload_of(*requests)).run().classes
    return classes["chat"].attainment == 0.0, classes["documents"].attainment == 0.0


@each("gateway", [{}, {"default_ttft_s": "auto"}, {"default_ttft_s": "none", "default_tpot_s": "none"}])
def test_a_trace_without_objectives_stays_without_unless_seconds_are_set(gateway: dict[str, Any]) -> None:
    assert _attainment_of_plain_chat(**gateway) == (False, False)


@each("gateway", [{"default_ttft_s": 0.01}, {"default_tpot_s": 0.001}])
def test_seconds_that_are_set_are_those_of_simulated_chat_too(gateway: dict[str, Any]) -> None:
    assert _attainment_of_plain_chat(**gateway) == (True, False)

"""ALISE and FastServe over random histories: every variant is sound, none starves past the bound, and requests
do not displace each other in turn."""

from collections.abc import Mapping
from typing import Any

import pytest
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits, IterationPlan, WorkerView
from tests.harnesses.policy_run import Arrival, PolicyRun, random_arrivals
from tests.harnesses.scheduling import EasyCosts, request_of
from tests.support.marks import slow

pytestmark = pytest.mark.slow

_SCARCE = DeviceMemory(30, 30, 16, num_free_host=2000)


def _flood(output_len: int, predicted_len: float, seconds: int) -> list[Arrival]:
    """Return a long request, and beside it, from the beginning, more short ones than the worker can serve."""
    long = request_of("long", {"prompt_len": 100, "max_tokens": 1000})
    short = {"prompt_len": 200, "max_tokens": 20}
    return [Arrival(long, output_len, predicted_len)] + [
        Arrival(request_of(f"s{number:04}", {**short, "arrival_s": number / 20 + 0.001}), 10, 10.0)
        for number in range(20 * seconds)
    ]


def _waited_s(name: str, config: Mapping[str, Any], arrivals: list[Arrival]) -> float:
    """Return the time that the long request spent outside iterations."""
    waited_s, long_id = 0.0, arrivals[0].request.request_id

    class Watched(PolicyRun):
        @override
        def _step(self, view: WorkerView) -> bool:
            nonlocal waited_s
            if long_id in view.table:
                waited_s = view.now - float(view.table.service_s[view.table.row(long_id)])
            return super()._step(view)

    run = Watched(make_policy(name, config), _SCARCE, IterationLimits(4, 512), EasyCosts(token_s=0.0005))
    run.run(arrivals)
    return waited_s


def test_alise_starves_no_request_past_its_bound() -> None:
    """With seven levels to climb and 0.5 s for each, it waits 3.5 s in all, and then goes before all who came later."""
    arrivals = _flood(300, 300.0, 15)
    assert _waited_s("alise", {"age_threshold_s": 0.5}, arrivals) <= 7 * 0.5 + 0.3
    assert _waited_s("alise", {"age_threshold_s": 1000.0}, arrivals) > 10.0


def test_fastserve_starves_no_request_past_its_bound() -> None:
    """About 300 iterations of up to 0.1 s; a promotion, every second of waiting, pays for 15 quanta of 0.1 s."""
    arrivals = _flood(100, 100.0, 15)
    config = {"first_quantum_s": 0.1, "starvation_s": 1.0}
    total_s = 100 * 0.2
    assert _waited_s("fastserve", config, arrivals) <= 1.0 * (total_s / (15 * 0.1) + 1) + 0.3
    assert _waited_s("fastserve", {**config, "starvation_s": 1000.0}, arrivals) > 10.0


class _NoRevenge:
    """A policy under watch: no request enters by displacing one that displaced it an iteration ago."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._policy = make_policy(name, config)
        self._entered: set[RequestId] = set()
        self._displaced: set[RequestId] = set()
        self.num_displaced = 0

    def plan(self, view: WorkerView) -> IterationPlan:
        plan = self._policy.plan(view)
        ids = view.table.request_ids
        entered = {ids[share.row] for share in plan.scheduled if not view.table.num_blocks[share.row]}
        displaced = {ids[part.row] for part in plan.evictions}
        assert not (displaced & self._entered and entered & self._displaced)
        self._entered, self._displaced = entered, displaced
        self.num_displaced += len(displaced)
        return plan


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
@pytest.mark.parametrize(("name", "config"), [("alise", {}), ("alise", {"preemption": "recompute"}), ("fastserve", {})])
def test_no_ping_pong(name: str, config: Mapping[str, Any], seed: int) -> None:
    PolicyRun(_NoRevenge(name, config), _SCARCE).run(random_arrivals(seed, 30))


@pytest.mark.parametrize("name", ["alise", "fastserve"])
def test_equals_are_displaced_only_by_growth(name: str) -> None:
    """Twelve equal requests of four blocks that grow to five: at most one is displaced for each that finishes."""
    fields = {"prompt_len": 60, "max_tokens": 20}
    arrivals = [Arrival(request_of(f"e{number:02}", fields), 20, 20.0) for number in range(12)]
    watched = _NoRevenge(name, {})
    PolicyRun(watched, _SCARCE).run(arrivals)
    assert watched.num_displaced <= 12

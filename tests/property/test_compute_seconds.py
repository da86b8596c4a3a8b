"""What workers tell of the seconds that requests computed adds up to the time of their iterations, whatever happens."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.config.sections import SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, SamplingParams
from alignedserve.messages.events import Send, SendTo
from alignedserve.messages.gateways import PromptScored, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.worker_core.compute_meter import ComputeMeter
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import Logic, LogicCluster
from tests.support.marks import many

SHAPES = (
    Shape(num_prefill=2, num_decode=3),
    Shape(pool_blocks=16, worker_blocks=18),
    Shape(is_colocated=True, worker_blocks=20, host_tokens=60, settings=(("preemption", "swap"),)),
    Shape(worker_blocks=20, host_tokens=60, disaggregated_scheduling=SchedulingConfig(policy="fastserve")),
    Shape(is_colocated=True, is_elastic=True, num_decode=3, worker_blocks=24, scheduling="aligned_slo"),
)


class Ledger:
    """What iterations took, and what gateways were told of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.busy_s = 0.0
        self.told: defaultdict[RequestId, float] = defaultdict(float)  # seconds
        self.meters: list[ComputeMeter] = []

    @property
    def untold_s(self) -> float:
        return sum(sum(meter._untold.values()) for meter in self.meters)


class Metered:
    """A worker's logic with a meter beside it, as the driver of logics joins them."""

    def __init__(self, logic: Any, ledger: Ledger) -> None:
        self._logic, self._ledger, self._meter = logic, ledger, ComputeMeter()
        self._has_slices = False
        ledger.meters.append(self._meter)

    def on_event(self, event: Any, now: float) -> list[Any]:
        self._meter.happened(self._timed(event) if isinstance(event, IterationCompleted) else event)
        commands: list[Any] = self._logic.on_event(event, now)
        for command in commands:
            if isinstance(command, SendTo):
                self._note(self._meter.told(command.message))
            elif not isinstance(command, Send):
                self._meter.commanded(command)
            if isinstance(command, RunIteration):
                self._has_slices = bool(command.slices)
        for left in self._meter.left_over():
            self._note(left.message)
        return commands

    def _timed(self, event: IterationCompleted) -> IterationCompleted:
        duration_s = self._ledger.rng.uniform(0.001, 0.1)
        self._ledger.busy_s += duration_s * self._has_slices
        return replace(event, times=IterationTimes(5.0, 5.0 + duration_s, 0.0, duration_s, 0.0))

    def _note(self, message: object) -> None:
        match message:
            case TokensEmitted(deltas, seconds):
                assert len(deltas) == len(seconds)
                for delta, compute_s in zip(deltas, seconds, strict=True):
                    self._ledger.told[delta.request_id] += compute_s
            case PromptScored(request_id=request_id, compute_s=compute_s):
                self._ledger.told[request_id] += compute_s


class MeteredCluster(LogicCluster):
    def __init__(self, shape: Shape, seed: int) -> None:
        self.ledger = Ledger(seed)
        super().__init__(shape, seed)

    @override
    def _make(self, name: str) -> tuple[Logic, Role]:
        logic, role = super()._make(name)
        is_worker = role in (Role.PREFILL_WORKER, Role.DECODE_WORKER)
        return (Metered(logic, self.ledger) if is_worker else logic), role  # type: ignore[return-value]


def request_of(number: int, rng: random.Random) -> Request:
    prompt = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 30)))
    sampling = SamplingParams(max_tokens=rng.randrange(0, 30), temperature=0.0)
    return Request(RequestId(f"r{number:03d}"), prompt, sampling, "gateway", number * 0.001)


def play(seed: int, shape: Shape) -> None:
    rng, cluster, num_killed = random.Random(seed), MeteredCluster(shape, seed), 0
    for number in range(20):
        cluster.submit(request_of(number, rng))
        for _ in range(rng.randrange(60)):
            cluster.step()
        chance = rng.random()
        if chance < 0.15:
            cluster.abort(rng.choice(list(cluster.client.requests)))
        elif chance < 0.3:
            lost = rng.choice([name for name in cluster.logics if name != "router"])
            cluster.kill(lost)
            cluster.start(lost)
            num_killed += 1
    cluster.run()
    ledger, client = cluster.ledger, cluster.client
    assert sum(ledger.told.values()) + ledger.untold_s == pytest.approx(ledger.busy_s)
    answered = [key for key, end in client.ends.items() if isinstance(end, FinishReason)]
    assert all(ledger.told[key] > 0.0 for key in answered), "an answer that cost nothing"
    if not num_killed:  # what is not told yet is of those that nobody waits for
        assert {key for meter in ledger.meters for key in meter._untold} <= client.aborted


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_all_seconds_of_iterations_are_told_once(seed: int, shape: Shape) -> None:
    play(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(400)))
def test_many_histories(seed: int) -> None:
    play(seed, SHAPES[seed % len(SHAPES)])

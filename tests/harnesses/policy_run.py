"""A worker with nothing but a policy: runs it over a list of arrivals and checks every plan.

Time passes as the cost model says. Every request generates `output_len` tokens, which the policy does not know.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.model import CostModel
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits, IterationPlan, IterationPolicy, WorkerView
from alignedserve.scheduling.scheduler_state import SchedulerState
from tests.harnesses.scheduling import EasyCosts, assert_sound, request_of


@dataclass(frozen=True)
class Arrival:
    """One request, and how many tokens it will generate."""

    request: Request
    output_len: int
    predicted_len: float | None = None


@dataclass
class Course:
    """The course of one request."""

    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    longest_wait_s: float = 0.0  # between two iterations it was in, or until the first


@dataclass
class PolicyRun:
    """Steps one worker under one policy until everything has ended."""

    policy: IterationPolicy
    memory: DeviceMemory = field(default_factory=lambda: DeviceMemory(200, 200, 16))  # with nothing in it
    limits: IterationLimits = field(default_factory=lambda: IterationLimits(max_running_requests=32, max_tokens=512))
    costs: CostModel = field(default_factory=EasyCosts)
    courses: dict[str, Course] = field(default_factory=dict)
    now: float = 0.0
    num_iterations: int = 0

    def run(self, arrivals: Sequence[Arrival], max_iterations: int = 100_000) -> dict[str, Course]:
        """Return every course by request id. Fails if a plan is unsound, or nothing moves though requests wait."""
        self.state = SchedulerState(self.memory)
        self._left: dict[RequestId, int] = {}
        coming = iter(sorted(arrivals, key=lambda one: (one.request.arrival_s, one.request.request_id)))
        following = next(coming, None)
        while following is not None or len(self.state.table):
            while following is not None and (following.request.arrival_s <= self.now or not len(self.state.table)):
                self.now = max(self.now, following.request.arrival_s)
                self._arrive(following)
                following = next(coming, None)
            assert self._step(self.state.view(limits=self.limits, costs=self.costs, now=self.now)), "nothing moves"
            assert self.num_iterations < max_iterations, "no end"
        assert self.state.num_free == self.memory.num_blocks, "a block is lost"
        assert self.state.num_free_host == self.memory.num_free_host, "host memory is lost"
        return self.courses

    def _arrive(self, arrival: Arrival) -> None:
        request_id = arrival.request.request_id
        self.state.add(arrival.request, self.now, predicted_len=arrival.predicted_len)
        self.courses[str(request_id)] = Course()
        self._left[request_id] = arrival.output_len

    def _step(self, view: WorkerView) -> bool:
        plan = self.policy.plan(view)
        assert_sound(view, plan)
        if not plan.scheduled:
            return False
        self.state.begin(plan)
        duration_s = self.costs.iteration_s(self.state.work)
        self._note_waits(plan)
        for part in plan.evictions:
            self.state.evict(part, self.now)
            self.courses[str(view.table.request_ids[part.row])].num_preemptions += 1
        for join in plan.shares:
            self.state.share_last_block(join)
        for share in plan.scheduled:
            self.state.enter(share)
        for row in plan.uploads:
            self.state.upload(row)
        self.now += duration_s
        self.num_iterations += 1
        rows = np.array([share.row for share in plan.scheduled])
        has_sampled = self.state.completed(now=self.now, duration_s=duration_s)
        for request_id in [view.table.request_ids[row] for row in rows[has_sampled]]:
            self.courses[str(request_id)].token_times_s.append(self.now)
            self._left[request_id] -= 1
            if not self._left[request_id]:
                self.state.remove(request_id)
        return True

    def _note_waits(self, plan: IterationPlan) -> None:
        table = self.state.table
        for share in plan.scheduled:
            course = self.courses[str(table.request_ids[share.row])]
            since = max(float(table.last_run_s[share.row]), float(table.arrival_s[share.row]))
            course.longest_wait_s = max(course.longest_wait_s, self.now - since)


def random_arrivals(seed: int, count: int = 40, *, max_prompt: int = 400, max_output: int = 40) -> list[Arrival]:
    """Draw bursty arrivals of both classes, some with SLOs, some predicted badly."""
    return list(_random_arrivals(np.random.default_rng(seed), count, max_prompt, max_output))


def _random_arrivals(rng: np.random.Generator, count: int, max_prompt: int, max_output: int) -> Iterator[Arrival]:
    arrival_s = 0.0
    for number in range(count):
        arrival_s += float(rng.exponential(0.5)) * (rng.random() < 0.5)
        output_len = int(rng.integers(1, max_output + 1))
        fields = {
            "arrival_s": arrival_s,
            "prompt_len": int(rng.integers(1, max_prompt + 1)),
            "max_tokens": max(max_output, output_len),
            "be": bool(rng.random() < 0.4),
            "ttft_s": float(rng.choice([0.2, 1.0, 5.0])) if rng.random() < 0.7 else None,
            "tpot_s": float(rng.choice([0.03, 0.1, 0.5])) if rng.random() < 0.7 else None,
            "deadline_s": float(rng.choice([5.0, 60.0])) if rng.random() < 0.3 else None,
            "priority": int(rng.integers(-1, 2)) if rng.random() < 0.2 else 0,
        }
        predicted = float(output_len * rng.lognormal(0.0, 0.5)) if rng.random() < 0.8 else None
        yield Arrival(request_of(f"request-{number:03}", fields), output_len, predicted)

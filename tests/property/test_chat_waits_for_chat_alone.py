"""Random histories in every topology: a chat waits for the iteration in flight, for real-time work, and for the floor.

The formula is that of docs/policies/aligned_slo.md, section "Chat beside documents". Costs are of tokens alone, so that
each class's part of an iteration can be told from its slices.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import RouterConfig, SchedulingConfig
from alignedserve.core.class_floor import ClassFloor, TurnClass
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, Slo
from alignedserve.messages.events import Received
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import PrefillRequest
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import BatchLimits
from kvpool.state import PooledRequest
from lab.sim.components import SimulatedComponent
from lab.sim.engine import SimulatedEngine, SimulatedIteration
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload
from router.policies import LeastSlackOrder
from router.prefill_queue import PrefillQueue
from tests.harnesses.scheduling import EasyCosts
from tests.harnesses.simulation import timed, workload_of
from tests.sim.test_chat_beside_documents import TOPOLOGIES
from tests.support.marks import many
from tests.support.samples import request

BASE_S, TOKEN_S, TTFT_S = 0.010, 0.001, 0.6
STARVING_SHARE, RESPONSE_SHARE, FLOOR = 0.1, 0.2, 0.05  # defaults of the policy and of the router
MESSAGES_S = 0.001
# Half of the documents wait for the floor, after half a second.
POLICY = SchedulingConfig(policy="aligned_slo", policy_params={})


@dataclass
class Iteration:
    """One iteration of one worker."""

    began_s: float
    duration_s: float
    tokens: dict[RequestClass, int]
    request_ids: frozenset[RequestId]

    @property
    def best_effort_s(self) -> float:
        """Time that best effort adds to it."""
        real_time_s = BASE_S + TOKEN_S * self.tokens[RequestClass.REAL_TIME] if self.tokens else 0.0
        return max(self.duration_s - real_time_s, 0.0)


@dataclass
class Course:
    """What happened, in order."""

    requests: dict[RequestId, Request] = field(default_factory=dict)
    submitted_s: dict[RequestId, float] = field(default_factory=dict)
    dispatched: dict[RequestId, tuple[float, str]] = field(default_factory=dict)  # the first time
    iterations: dict[str, list[Iteration]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record simulations meanwhile."""
        dispatch, begin = SimulatedComponent.dispatch, SimulatedEngine.begin
        worker = [""]

        def dispatched(component: SimulatedComponent, event: Any) -> None:
            if isinstance(event, Received):
                self._note(component, event.message)
            worker[0] = component.name
            dispatch(component, event)

        def begun(engine: SimulatedEngine, command: RunIteration, now: float) -> SimulatedIteration:
            made = begin(engine, command, now)
            tokens = dict.fromkeys(RequestClass, 0)
            for request_id, num_tokens in command.slices:
                tokens[self.requests[request_id].request_class] += num_tokens
            request_ids = frozenset(request_id for request_id, _ in command.slices)
            self.iterations[worker[0]].append(Iteration(now, made.duration_s, tokens, request_ids))
            return made

        with (
            mock.patch.object(SimulatedComponent, "dispatch", dispatched),
            mock.patch.object(SimulatedEngine, "begin", begun),
        ):
            yield

    def _note(self, component: SimulatedComponent, message: object) -> None:
        now = component._event_queue.now
        if isinstance(message, SubmitRequest):
            self.requests[message.request.request_id] = message.request
            self.submitted_s[message.request.request_id] = now
        elif isinstance(message, PrefillRequest):
            self.dispatched.setdefault(message.request.request_id, (now, component.name))


def history(seed: int, num_documents: int, rate: float) -> Workload:
    """Draw chat at this rate for four seconds, beside documents that come at once or one after the other."""
    rng = random.Random(seed)
    burst = rng.random() < 0.5
    documents: dict[str, Any] = {
        "class_name": "documents",
        "request_class": RequestClass.BEST_EFFORT,
        "slo": Slo(deadline_s=rng.choice([None, 3.0])),
    }
    requests = [
        timed(0.0 if burst else rng.uniform(0.0, 3.0), rng.randrange(20, 300), rng.randrange(5, 200), **documents)
        for _ in range(num_documents)
    ]
    now = 0.0
    while (now := now + rng.expovariate(rate)) < 4.0:
        slo = Slo(ttft_s=TTFT_S, tpot_s=rng.choice([None, 0.2]))
        requests.append(timed(now, rng.randrange(10, 60), rng.randrange(2, 15), slo=slo))
    return workload_of(*sorted(requests, key=lambda one: one.arrival_s))


def course_of(name: str, workload: Workload) -> Course:
    config, course = TOPOLOGIES[name], Course()
    router = RouterConfig(prefill_order="least_slack", best_effort_floor=FLOOR)
    changed = msgspec.structs.replace
    # Places that real-time requests hold while they leave are not at issue here: there are enough.
    prefill = changed(config.cluster.prefill, max_running_requests=128)
    cluster = changed(config.cluster, scheduling=POLICY, router=router, prefill=prefill)
    costs: dict[str, Any] = {
        "decode_costs": EasyCosts(BASE_S, TOKEN_S, context_s=0.0),
        "prefill_costs": None,
        "learns_costs": False,
    }
    with course.recorded():
        Simulation(replace(config, cluster=cluster, **costs, duration_s=6.0), workload).run()
    return course


def assert_waits_for_no_document(course: Course) -> int:
    """Check every chat; return how many there were."""
    chats = [one for one in course.requests.values() if one.request_class is RequestClass.REAL_TIME]
    for chat in chats:
        came_s, worker = course.dispatched[chat.request_id]
        assert_no_document_went_before(course, chat)
        own = course.iterations[worker]
        longest_s = max(one.duration_s for one in own)
        started_s = min(one.began_s for one in own if chat.request_id in one.request_ids)
        waited = [one for one in own if came_s <= one.began_s < started_s]
        in_flight = [one for one in own if one.began_s < came_s < one.began_s + one.duration_s]
        free_s = max([came_s, *(one.began_s + one.duration_s for one in (*in_flight, *waited))])
        floor_s = STARVING_SHARE * max(RESPONSE_SHARE * TTFT_S, longest_s) + TOKEN_S
        assert all(one.best_effort_s <= floor_s + 1e-9 for one in waited), (chat.request_id, waited)
        assert started_s - free_s <= MESSAGES_S, "the worker rests, and a chat waits"
    return len(chats)


def assert_no_document_went_before(course: Course, chat: Request) -> None:
    """Between the arrival of a chat at the router and the moment it is given to a worker."""
    submitted_s, (given_s, _) = course.submitted_s[chat.request_id], course.dispatched[chat.request_id]
    given = dict.fromkeys(RequestClass, 0)
    largest = 0
    for request_id, (at_s, _) in course.dispatched.items():
        other = course.requests[request_id]
        if submitted_s + MESSAGES_S < at_s < given_s:
            given[other.request_class] += other.prompt_len
            largest = max(largest, other.prompt_len if other.request_class is RequestClass.BEST_EFFORT else 0)
    owed = ClassFloor(FLOOR).owed_share * given[RequestClass.REAL_TIME]
    assert given[RequestClass.BEST_EFFORT] <= owed + largest


HISTORIES = st.tuples(st.integers(0, 10**6), st.integers(0, 70), st.sampled_from([1.0, 4.0, 10.0]))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_chat_starts_after_the_iteration_in_flight_real_time_work_and_the_floor(name: str) -> None:
    assert assert_waits_for_no_document(course_of(name, history(3, 40, 4.0))) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
@given(HISTORIES)
@settings(max_examples=many(300), deadline=None)
def test_so_it_does_in_any_history(name: str, drawn: tuple[int, int, float]) -> None:
    assert_waits_for_no_document(course_of(name, history(*drawn)))


# --- the same formula in the queue of the router and in the pool, without time


EVENTS = st.lists(st.tuples(st.sampled_from(["chat", "document", "take"]), st.integers(1, 500)), max_size=80)


@given(EVENTS, st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=100)
def test_tokens_before_a_chat_in_the_queue(events: list[tuple[str, int]], floor: float) -> None:
    queue, passed = PrefillQueue(LeastSlackOrder(), floor=floor), Passed(floor)
    for number, (what, size) in enumerate(events):
        if what == "take":
            for turn in queue.turns(0.0)[:1]:
                queue.take(turn.request_id, 0.0)
                passed.took(turn.request_id)
            continue
        request_class = RequestClass.REAL_TIME if what == "chat" else RequestClass.BEST_EFFORT
        one = request(f"r{number:03}", arrival_s=float(number), request_class=request_class)
        queue.push(one, size)
        passed.came(one.request_id, size, is_chat=what == "chat")


@given(EVENTS, st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from(["density_first", "fcfs"]))
@settings(max_examples=100)
def test_tokens_before_a_chat_in_the_pool(events: list[tuple[str, int]], floor: float, name: str) -> None:
    former = make_batch_former(name, block_size=16, starvation_s=2.0, best_effort_floor=floor)
    passed = Passed(floor)
    for number, (what, size) in enumerate(events):
        if what == "take":
            batch = former.form(BatchLimits(10_000, size % 5 + 1), float(number))
            lengths = [passed.waiting[one][0] for one in batch.request_ids] if batch is not None else []
            assert batch is None or (batch.lengths.start, batch.lengths.stop) == (min(lengths), max(lengths) + 1)
            for request_id in sorted(batch.request_ids if batch is not None else (), key=passed.is_document):
                former.remove(request_id)
                passed.took(request_id)
            continue
        turn_class = TurnClass.ON_TIME if what == "chat" else TurnClass.BEST_EFFORT
        one = PooledRequest(RequestId(f"r{number:03}"), size, -(-size // 16), float(number), None, turn_class)
        former.insert(one, float(number))
        passed.came(one.request_id, size, is_chat=what == "chat")


class Passed:
    """Counts what goes before each chat that waits, and checks it against the formula."""

    def __init__(self, floor: float) -> None:
        self.waiting: dict[RequestId, tuple[int, bool]] = {}
        self._owed_share = floor / (1.0 - floor)
        self._before: dict[RequestId, list[int]] = {}  # by chat: tokens of chats, of documents, the largest document

    def is_document(self, request_id: RequestId) -> bool:
        return not self.waiting[request_id][1]

    def came(self, request_id: RequestId, size: int, *, is_chat: bool) -> None:
        self.waiting[request_id] = (size, is_chat)
        if is_chat:
            self._before[request_id] = [0, 0, 0]

    def took(self, request_id: RequestId) -> None:
        size, is_chat = self.waiting.pop(request_id)
        self._before.pop(request_id, None)
        for before in self._before.values():
            before[not is_chat] += size
            before[2] = max(before[2], 0 if is_chat else size)
            assert before[1] <= self._owed_share * before[0] + before[2] + 1e-6
            assert self._owed_share or not before[1]

"""Random histories of elastic workers: moves stay within their bounds, whatever is aborted, cut or lost."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import MoveRequest, RequestMoved
from router.leans import MAX_MOVES, REST_S, Leans, PlannedMove
from router.logic import RouterLogic
from router.state import TrackedRequest, WorkerRecord
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, make_requests, some_steps
from tests.support.marks import many

SHAPE = Shape(is_colocated=True, is_elastic=True, num_decode=3, worker_blocks=40, scheduling="aligned_slo")


class RestlessLeans(Leans):
    """Moves any request to any other worker, all the time: every step of a move meets every other event."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    @override
    def moves(
        self, workers: Iterable[WorkerRecord], requests: Mapping[RequestId, TrackedRequest], now: float
    ) -> list[PlannedMove]:
        able = [one for one in workers if one.can_take_over]
        decoded = [one for one in requests.values() if one.stage is Stage.DECODING and one.destination is None]
        chosen = [(one, self._rng.choice(able)) for one in decoded if able and self._rng.random() < 0.5]
        return [PlannedMove(one, receiver) for one, receiver in chosen if one.holder != receiver.name]


class WatchedCluster(LogicCluster):
    """Notes every move that is ordered, and every one that was made."""

    def __init__(self, seed: int, *, is_restless: bool) -> None:
        self.ordered: list[tuple[float, str, MoveRequest]] = []  # when, and of whom
        self.moved: Counter[RequestId] = Counter()
        self._is_restless = is_restless
        super().__init__(SHAPE, seed)

    @override
    def _make(self, name: str) -> Any:
        made, role = super()._make(name)
        if isinstance(made, RouterLogic) and self._is_restless:
            made._leans = RestlessLeans(self.rng)
        return made, role

    @override
    def _send(self, source: str, target: str, message: Message) -> None:
        if isinstance(message, MoveRequest):
            self.ordered.append((self.now, target, message))
        if isinstance(message, RequestMoved):
            self.moved[message.request_id] += 1
        super()._send(source, target, message)


def history(seed: int, *, is_restless: bool = False) -> WatchedCluster:
    """Play a history: requests come, are given up, workers and links are lost; all that is left ends."""
    rng = random.Random(seed)
    cluster = WatchedCluster(seed, is_restless=is_restless)
    for request in make_requests(rng, 20):
        cluster.submit(request)
        some_steps(cluster, rng, 40)
        if rng.random() < 0.6:
            cluster.tick()
        if rng.random() < 0.1:
            cluster.abort(rng.choice(list(cluster.client.requests)))
        links = [key for key in cluster.links if not {"router", "gateway-0"} & set(key)]
        if links and rng.random() < 0.1:
            cluster.cut(*rng.choice(links))
        if rng.random() < 0.1:
            name = f"decode-{rng.randrange(3)}"
            cluster.kill(name)
            cluster.start(name)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)
    return cluster


@settings(max_examples=6)
@given(seed=st.integers(0, 10**9))
def test_moves_stay_within_their_bounds(seed: int) -> None:
    cluster = history(seed)
    ordered = Counter(message.request_id for _, _, message in cluster.ordered)
    assert max(ordered.values(), default=0) <= MAX_MOVES
    assert all(count <= ordered[request_id] for request_id, count in cluster.moved.items())
    turns: dict[str, set[float]] = defaultdict(set)
    for at_s, giver, message in cluster.ordered:
        turns[giver].add(at_s)
        turns[str(message.to)].add(at_s)
    for times in turns.values():
        assert all(later - former > REST_S - 1e-6 for former, later in pairwise(sorted(times)))


@settings(max_examples=6)
@given(seed=st.integers(0, 10**9))
def test_requests_that_move_all_the_time_end_once(seed: int) -> None:
    history(seed, is_restless=True)


@settings(max_examples=4)
@given(seed=st.integers(0, 10**9))
def test_those_that_outgrow_what_was_foreseen_end_once(seed: int) -> None:
    with patch("alignedserve.worker_core.held_requests._FORESEEN_TOKENS", 0):
        history(seed, is_restless=True)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_requests_that_move_while_routers_are_lost_end_once(seed: int) -> None:
    rng = random.Random(seed)
    cluster = WatchedCluster(seed, is_restless=True)
    for request in make_requests(rng, 16):
        cluster.submit(request)
        some_steps(cluster, rng, 60)
        if rng.random() < 0.15:
            cluster.kill("router")
            some_steps(cluster, rng, 30)
            cluster.start_router_slowly()
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(100)))
def test_many_histories(seed: int) -> None:
    history(seed)
    history(seed, is_restless=True)


def test_histories_have_moves() -> None:
    assert sum(history(7, is_restless=True).moved.values()) > 0

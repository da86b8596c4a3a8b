"""Whatever gateways come late, end or are started anew: no key has more requests open than its limit."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.keys.open_counts import FORGET_S, OpenCounts, OpenPool, OpenStatement, Verdict, Wish
from alignedserve.keys.quotas import LEASE_S

KEYS = {"a": 3, "b": 1}


class Gateway:
    """A process, what of it is on its way, and what its clients really have open."""

    def __init__(self, name: str, number: int) -> None:
        self.counts = OpenCounts(name, f"process-{number}", 0.0)
        self.calls: list[OpenStatement] = []  # on their way to the server, in order, as on a link
        self.is_open: list[str] = []


class World:
    def __init__(self, rng: random.Random, num_gateways: int) -> None:
        self.rng = rng
        self.now = 100.0
        self.pool = OpenPool(self.now - LEASE_S)
        self.num_processes = 0
        self.gateways: dict[str, Gateway] = {}
        for number in range(num_gateways):
            self.begin(f"gateway-{number}")

    def begin(self, name: str) -> None:
        """Start a gateway: a late one, or another process in the place of one that has died."""
        self.num_processes += 1
        self.gateways[name] = Gateway(name, self.num_processes)

    def step(self, one: Gateway) -> None:
        match self.rng.randrange(6):
            case 0 | 1:
                key = self.rng.choice(list(KEYS))
                one.counts.begin(key)
                one.calls.append(one.counts.asking(Wish(key, KEYS[key])))
            case 2 if one.is_open:
                one.counts.end(one.is_open.pop(self.rng.randrange(len(one.is_open))))
                one.calls.append(one.counts.ended())
            case 3:
                one.calls.append(one.counts.whole())
            case _ if one.calls:
                self.deliver(one)

    def deliver(self, one: Gateway) -> None:
        statement = one.calls.pop(0)
        is_lost, is_answer_lost = (self.rng.random() < 0.1 for _ in range(2))
        verdict = Verdict.AGAIN if is_lost else self.pool.on_statement(statement, self.now)
        if statement.wish is None:
            return
        key = statement.wish.key
        if verdict is Verdict.IN and not is_answer_lost:
            one.is_open.append(key)
        else:
            one.counts.end(key)

    def check(self) -> None:
        for key, limit in KEYS.items():
            assert sum(one.is_open.count(key) for one in self.gateways.values()) <= limit

    def settle(self) -> None:
        """Deliver everything, and one more statement of each."""
        for one in self.gateways.values():
            while one.calls:
                self.deliver(one)
            assert self.pool.on_statement(one.counts.whole(), self.now) is Verdict.IN


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_gateways=st.integers(1, 4))
def test_never_more_open_than_the_limit_and_nothing_stays_counted(seed: int, num_gateways: int) -> None:
    rng = random.Random(seed)
    world = World(rng, num_gateways)
    for _ in range(300):
        world.now += rng.choice([0.0, 0.01])
        if rng.random() < 0.02:  # one dies, or comes late
            world.begin(f"gateway-{rng.randrange(num_gateways + 1)}")
        world.step(rng.choice(list(world.gateways.values())))
        world.check()
    world.settle()
    for key, limit in KEYS.items():
        num_open = sum(one.is_open.count(key) for one in world.gateways.values())
        assert world.pool.num_open(key, world.now) == num_open
        late = OpenCounts(f"late-{key}", "1", world.now)
        late.begin(key)
        verdict = world.pool.on_statement(late.asking(Wish(key, limit)), world.now)
        assert verdict is (Verdict.IN if num_open < limit else Verdict.FULL)  # all of it, or nothing


def asked(counts: OpenCounts, limit: int = 1) -> OpenStatement:
    counts.begin("a")
    return counts.asking(Wish("a", limit))


def test_a_gateway_that_is_gone_for_good_is_forgotten_after_a_minute() -> None:
    pool = OpenPool(-LEASE_S)
    assert pool.on_statement(asked(OpenCounts("gone", "1", 0.0)), 0.0) is Verdict.IN
    other = OpenCounts("other", "1", 0.0)
    assert pool.on_statement(asked(other), FORGET_S - 1.0) is Verdict.FULL
    other.end("a")
    assert pool.on_statement(asked(other), FORGET_S) is Verdict.IN


def test_a_server_that_has_just_begun_waits_for_what_is_open() -> None:
    pool, full, other = OpenPool(0.0), OpenCounts("full", "1", 0.0), OpenCounts("other", "1", 0.0)
    full.begin("a")  # of an earlier server
    assert pool.on_statement(asked(other), 0.0) is Verdict.AGAIN
    other.end("a")
    assert pool.on_statement(full.whole(), LEASE_S - 0.1) is Verdict.IN
    assert pool.on_statement(asked(other), LEASE_S) is Verdict.FULL


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_becomes_less_lets_nothing_in_until_enough_has_ended(limit: int) -> None:
    pool, counts = OpenPool(-LEASE_S), OpenCounts("a", "1", 0.0)
    for _ in range(3):
        assert pool.on_statement(asked(counts, 3), 0.0) is Verdict.IN
    for _ in range(3 - limit):
        assert pool.on_statement(asked(counts, limit), 0.0) is Verdict.FULL
        counts.end("a")  # what was not let in
        counts.end("a")
        pool.on_statement(counts.ended(), 0.0)
    assert pool.on_statement(asked(counts, limit), 0.0) is Verdict.FULL

"""Whatever gets lost, late or restarted: no key is ever let in more often than its limit allows, by all gateways."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core.quotas import LEASE_S, Bucket, OwnShare, QuotaCall, QuotaPool

LIMIT = 12
_STEP_S = 0.1


@dataclass
class Plain:
    """One bucket for all, the measure of the others."""

    owed: float = 0.0
    at_s: float = 0.0
    num_let_in: int = 0

    def let_in(self, now: float) -> None:
        self.owed = max(0.0, self.owed - (now - self.at_s) * LIMIT / 60.0) + 1.0
        self.at_s = now
        self.num_let_in += 1
        assert self.owed <= LIMIT + 1e-6


@dataclass
class Gateway:
    name: str
    clock_s: float  # its clock less the true time
    share: OwnShare
    is_cut_off: bool = False
    last_call_s: float = -1.0


@dataclass
class World:
    """Gateways and a state server, and messages between them that take their time."""

    rng: random.Random
    num_gateways: int
    max_delay_s: float
    num_joined: int = 0  # later, without a share
    now: float = 100.0
    plain: Plain = field(default_factory=Plain)
    calls: list[tuple[float, int, int, QuotaCall]] = field(default_factory=list)
    answers: list[tuple[float, int, int, float]] = field(default_factory=list)
    server_clock_s: float = 500.0
    incarnation: int = 0
    num_processes: int = 0

    def __post_init__(self) -> None:
        self.names = [f"gateway-{number}" for number in range(self.num_gateways + self.num_joined)]
        self.owners = self.names[: self.num_gateways]
        self.pool = QuotaPool(LIMIT, 1, self.owners, self.now + self.server_clock_s)
        self.gateways = [self.process(name, is_first=True) for name in self.names]

    def process(self, name: str, *, is_first: bool) -> Gateway:
        self.num_processes += 1
        clock_s = self.rng.uniform(-50.0, 50.0)
        now = self.now + clock_s
        owned = LIMIT / self.num_gateways if name in self.owners else 0.0
        share = OwnShare(owned, 1, str(self.num_processes), now)
        share.begin_used_up(now, is_first_process=is_first)
        return Gateway(name, clock_s, share)

    def step(self, load: float) -> None:
        self.now += _STEP_S
        self.deliver()
        for number, gateway in enumerate(self.gateways):
            if self.rng.random() < load:
                self.ask(number, gateway)
            elif self.now - gateway.last_call_s > LEASE_S / 5:
                self.send(number, gateway, None)

    def ask(self, number: int, gateway: Gateway) -> None:
        now = self.now + gateway.clock_s
        if gateway.share.seconds_leased(now) > 0.0:
            self.send(number, gateway, 0)
        elif not gateway.share.take(0, now):
            self.plain.let_in(self.now)

    def send(self, number: int, gateway: Gateway, key_number: int | None) -> None:
        gateway.last_call_s = self.now
        call = gateway.share.call(gateway.name, key_number, self.now + gateway.clock_s)
        if not gateway.is_cut_off:
            self.calls.append((self.now + self.rng.uniform(0.0, self.max_delay_s), number, self.incarnation, call))

    def deliver(self) -> None:
        due = [one for one in self.calls if one[0] <= self.now]
        self.calls = [one for one in self.calls if one[0] > self.now]
        for _, number, incarnation, call in due:
            if incarnation != self.incarnation:  # its connection is gone
                continue
            wait_s = self.pool.on_call(call, self.now + self.server_clock_s)
            if call.key_number is not None and not wait_s:
                self.plain.let_in(self.now)
            arrives_s = self.now + self.rng.uniform(0.0, self.max_delay_s)
            self.answers.append((arrives_s, number, incarnation, self.now + self.server_clock_s))
        for arrives_s, number, incarnation, clock_s in list(self.answers):
            gateway = self.gateways[number]
            if arrives_s <= self.now and incarnation == self.incarnation and not gateway.is_cut_off:
                gateway.share.on_answer(clock_s, self.now + gateway.clock_s)
        self.answers = [one for one in self.answers if one[0] > self.now]

    def fault(self, kind: int) -> None:
        number = self.rng.randrange(len(self.names))
        if kind == 0:
            self.gateways[number].is_cut_off ^= True
        elif kind == 1:
            self.calls = [one for one in self.calls if one[1] != number]
            self.answers = [one for one in self.answers if one[1] != number]
            self.gateways[number] = self.process(self.names[number], is_first=False)
        elif kind == 2:
            self.incarnation += 1
            self.server_clock_s = self.rng.uniform(-60.0, 900.0)
            self.pool = QuotaPool(LIMIT, 1, self.owners, self.now + self.server_clock_s)
            for gateway in self.gateways:
                gateway.share.on_new_link(self.now + gateway.clock_s)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num_gateways=st.integers(1, 4),
    num_joined=st.integers(0, 2),
    max_delay_s=st.sampled_from([0.0, 0.3, 5.0]),
    fault_rate=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_never_more_than_the_limit(
    seed: int, num_gateways: int, num_joined: int, max_delay_s: float, fault_rate: float
) -> None:
    rng = random.Random(seed)
    world = World(rng, num_gateways, max_delay_s, num_joined)
    for _ in range(600):
        if rng.random() < fault_rate:
            world.fault(rng.randrange(3))
        world.step(load=rng.choice((0.0, 0.2, 0.9)))


def test_an_answer_that_comes_late_gives_nothing_back() -> None:
    share = OwnShare(6.0, 1, "a", 0.0)
    assert share.take(0, 0.0) == 0.0
    share.on_answer(77.0, 1.0)
    assert share.seconds_leased(1.5) == pytest.approx(LEASE_S - 0.5)
    assert share.seconds_leased(1.0 + LEASE_S) == 0.0
    assert share.take(0, 1.0 + LEASE_S) == pytest.approx(10.0)  # a sixth of the minute for one request


def test_calls_that_make_no_sense_count_nothing() -> None:
    pool = QuotaPool(6, 2, ["a"], 0.0)
    pool.on_call(QuotaCall("a", "1", 0.0, (0.0,)), 0.0)
    assert not pool.is_member("a")
    assert pool.on_call(QuotaCall("a", "1", 0.0, (0.0, 0.0), key_number=9), 0.0) > 0.0
    assert pool.is_member("a")
    assert pool.on_call(QuotaCall("a", "1", 1e9, (0.0, 0.0), key_number=1), 1.0) == 0.0
    assert pool.on_call(QuotaCall("later", "1", 1.0, (0.0, 0.0), key_number=1), 1.0) == 0.0


def test_within_a_lease_the_share_is_told_once() -> None:
    share = OwnShare(6.0, 3, "a", 0.0)
    assert share.call("a", 0, 0.0).spent == (0.0, 0.0, 0.0)
    share.on_answer(50.0, 0.1)
    assert share.call("a", 0, 0.2).spent == (0.0, 0.0, 0.0)  # of this one it may become a member
    share.on_answer(50.2, 0.3)
    assert share.call("a", 0, 0.4).spent == ()
    share.on_answer(50.4, 0.5)
    assert share.call("a", 0, 0.5 + LEASE_S).spent == (6.0, 6.0, 6.0)  # the lease has ended
    assert share.call("a", 0, 5.5 + LEASE_S).spent == (5.5, 5.5, 5.5)
    share.on_answer(60.0, 8.0)
    share.on_new_link(8.0)
    assert share.call("a", 0, 8.0).spent == (6.0, 6.0, 6.0)


def test_a_gateway_that_tells_no_numbers_has_used_its_share() -> None:
    pool = QuotaPool(6, 2, ["a", "b"], 0.0)
    for gateway, spent in (("a", ()), ("b", (0.0, 0.0))):
        pool.on_call(QuotaCall(gateway, "1", 0.0, spent), 0.0)
        assert pool.is_member(gateway)
    waits_s = [pool.on_call(QuotaCall("b", "1", 0.0, (), key_number=1), 0.0) for _ in range(4)]
    assert [wait_s > 0.0 for wait_s in waits_s] == [False, False, False, True]


class PlainBucket:
    """A bucket that pays back for every key at every call."""

    def __init__(self, num_keys: int, limit: float) -> None:
        self.limit, self.owed, self.at_s = limit, [0.0] * num_keys, 0.0

    def pay_back(self, now: float) -> None:
        paid, self.at_s = max(0.0, now - self.at_s) * self.limit / 60.0, max(now, self.at_s)
        self.owed = [max(0.0, one - paid) for one in self.owed]

    def take(self, key_number: int) -> bool:
        is_let_in = self.owed[key_number] + 1.0 <= self.limit + 1e-9
        self.owed[key_number] += is_let_in
        return is_let_in


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_bucket_owes_what_a_plain_one_does(seed: int) -> None:
    rng = random.Random(seed)
    num_keys, now = rng.randrange(1, 5), 0.0
    bucket, plain = Bucket(num_keys, 6.0, now), PlainBucket(num_keys, 6.0)
    for _ in range(60):
        now += rng.choice([0.0, 0.25, 3.0, 40.0, -1.0])
        plain.pay_back(now)
        match rng.randrange(6):
            case 0:
                plain.limit = rng.choice([0.0, 2.0, 6.0, 60.0])
                bucket.set_limit(plain.limit, now)
            case 1:
                owed = [rng.choice([-3.0, 0.0, 1.5]) for _ in range(num_keys)]
                plain.owed = [max(0.0, one + more) for one, more in zip(plain.owed, owed, strict=True)]
                bucket.add(owed, now)
            case 2:
                plain.owed = [max(one, plain.limit) for one in plain.owed]
                bucket.use_up(now)
            case _:
                key_number = rng.randrange(num_keys)
                assert (bucket.take(key_number, now) == 0.0) == plain.take(key_number)
        assert bucket.owed(now) == pytest.approx(plain.owed, abs=1e-6)

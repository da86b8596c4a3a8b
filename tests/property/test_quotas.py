"""Whatever gets lost, late or restarted: no key is ever let in more often than its limit allows, by all gateways."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.keys.quotas import (
    LEASE_S,
    Bucket,
    Charge,
    Owed,
    OwnShare,
    QuotaCall,
    QuotaPool,
    share_of_open,
    unused,
)

LIMIT = 12
_STEP_S = 0.1


@dataclass
class Plain:
    """One bucket for all, the measure of the others."""

    used: list[list[float]] = field(default_factory=list)  # when, and the part of the limit that was used in the end

    def let_in(self, now: float, cost: float) -> int:
        self.used.append([now, cost])
        return len(self.used) - 1

    def check(self) -> None:
        owed, at_s = 0.0, 0.0
        for now, cost in self.used:  # in the order of time
            owed = max(0.0, owed - (now - at_s) / 60.0) + cost
            at_s = now
            assert owed <= 1.0 + 1e-6


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
    returns: list[tuple[float, int, int]] = field(default_factory=list)  # when, by which gateway, of which use

    def __post_init__(self) -> None:
        self.names = [f"gateway-{number}" for number in range(self.num_gateways + self.num_joined)]
        self.owners = self.names[: self.num_gateways]
        self.pool = QuotaPool(self.owners, self.now + self.server_clock_s)
        self.gateways = [self.process(name, is_first=True) for name in self.names]

    def process(self, name: str, *, is_first: bool) -> Gateway:
        self.num_processes += 1
        clock_s = self.rng.uniform(-50.0, 50.0)
        now = self.now + clock_s
        owned = 1.0 / self.num_gateways if name in self.owners else 0.0
        share = OwnShare(owned, str(self.num_processes), now)
        share.begin_used_up(now, is_first_process=is_first)
        return Gateway(name, clock_s, share)

    def step(self, load: float) -> None:
        self.now += _STEP_S
        self.deliver()
        self.give_back()
        for number, gateway in enumerate(self.gateways):
            if self.rng.random() < load:
                self.ask(number, gateway)
            elif self.now - gateway.last_call_s > LEASE_S / 5:
                self.send(number, gateway, ())

    def ask(self, number: int, gateway: Gateway) -> None:
        now = self.now + gateway.clock_s
        charges = (Charge("a", self.rng.choice((1.0, 1.0, 3.0)) / LIMIT),)
        if gateway.share.seconds_leased(now) > 0.0:
            self.send(number, gateway, charges)
        elif not gateway.share.take(charges, now).wait_s:
            self.let_in(number, charges[0].cost)

    def let_in(self, number: int, cost: float) -> None:
        """Note what was let in; a part of it may turn out not to be used."""
        use = self.plain.let_in(self.now, cost)
        if self.rng.random() < 0.5:
            self.returns.append((self.now + self.rng.uniform(0.0, 20.0), number, use))

    def give_back(self) -> None:
        due = [one for one in self.returns if one[0] <= self.now]
        self.returns = [one for one in self.returns if one[0] > self.now]
        for _, number, use in due:
            used_s, cost = self.plain.used[use]
            too_much = cost * self.rng.random()
            self.plain.used[use][1] -= too_much
            gateway, now = self.gateways[number], self.now + self.gateways[number].clock_s
            charges = (Charge("a", -unused(too_much, self.now - used_s)),)
            if gateway.share.seconds_leased(now) > 0.0:
                self.send(number, gateway, charges)
            else:
                gateway.share.take(charges, now)

    def send(self, number: int, gateway: Gateway, charges: tuple[Charge, ...]) -> None:
        gateway.last_call_s = self.now
        call = gateway.share.call(gateway.name, charges, self.now + gateway.clock_s)
        if not gateway.is_cut_off:
            self.calls.append((self.now + self.rng.uniform(0.0, self.max_delay_s), number, self.incarnation, call))

    def deliver(self) -> None:
        due = [one for one in self.calls if one[0] <= self.now]
        self.calls = [one for one in self.calls if one[0] > self.now]
        for _, number, incarnation, call in due:
            if incarnation != self.incarnation:  # its connection is gone
                continue
            taken = self.pool.on_call(call, self.now + self.server_clock_s)
            if call.charges and call.charges[0].cost > 0.0 and not taken.wait_s:
                self.let_in(number, call.charges[0].cost)
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
            self.pool = QuotaPool(self.owners, self.now + self.server_clock_s)
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
    world.plain.check()


def of_six(count: float) -> float:
    """Return the part of a limit of six."""
    return count / 6.0


ONE = (Charge("a", of_six(1.0)),)


def test_an_answer_that_comes_late_gives_nothing_back() -> None:
    share = OwnShare(1.0, "a", 0.0)
    assert share.take(ONE, 0.0).wait_s == 0.0
    share.on_answer(77.0, 1.0)
    assert share.seconds_leased(1.5) == pytest.approx(LEASE_S - 0.5)
    assert share.seconds_leased(1.0 + LEASE_S) == 0.0
    assert share.take(ONE, 1.0 + LEASE_S).wait_s == pytest.approx(10.0)  # a sixth of the minute for one request


def test_a_call_of_what_is_no_member_counts_nothing() -> None:
    pool = QuotaPool(["a"], 0.0)
    assert pool.on_call(QuotaCall("a", "1", None, Owed(), ONE), 0.0).wait_s > 0.0
    assert not pool.is_member("a")
    assert pool.on_call(QuotaCall("a", "1", 1e9, Owed(), ONE), 1.0).wait_s == 0.0
    assert pool.on_call(QuotaCall("later", "1", 1.0, Owed(), ONE), 1.0).wait_s == 0.0


def test_within_a_lease_the_share_is_told_once() -> None:
    share = OwnShare(1.0, "a", 0.0)
    assert share.call("a", ONE, 0.0).spent == Owed()
    share.on_answer(50.0, 0.1)
    assert share.call("a", ONE, 0.2).spent == Owed()  # of this one it may become a member
    share.on_answer(50.2, 0.3)
    assert share.call("a", ONE, 0.4).spent is None
    share.on_answer(50.4, 0.5)
    assert share.call("a", ONE, 0.5 + LEASE_S).spent == Owed(1.0)  # the lease has ended
    assert share.call("a", ONE, 30.5 + LEASE_S).spent == Owed(0.5)
    share.on_answer(60.0, 33.0)
    share.on_new_link(33.0)
    assert share.call("a", ONE, 33.0).spent == Owed(1.0)


def test_a_gateway_that_tells_no_numbers_has_used_its_share() -> None:
    pool = QuotaPool(["a", "b"], 0.0)
    for gateway, spent in (("a", None), ("b", Owed())):
        pool.on_call(QuotaCall(gateway, "1", 0.0, spent), 0.0)
        assert pool.is_member(gateway)
    taken = [pool.on_call(QuotaCall("b", "1", 0.0, None, ONE), 0.0) for _ in range(4)]
    assert [one.wait_s > 0.0 for one in taken] == [False, False, False, True]
    assert taken[-1].owed == pytest.approx((1.0,))


def test_of_several_charges_all_are_counted_or_none() -> None:
    bucket = Bucket(1.0, 0.0)
    assert bucket.take((Charge("requests", 0.1), Charge("tokens", 0.9)), 0.0).wait_s == 0.0
    refused = bucket.take((Charge("requests", 0.1), Charge("tokens", 0.2)), 0.0)
    assert refused.wait_s == pytest.approx(6.0)
    assert refused.owed == pytest.approx((0.1, 0.9))
    assert bucket.take((Charge("requests", 0.0), Charge("tokens", 0.0)), 0.0).owed == pytest.approx((0.1, 0.9))


def test_what_is_given_back_late_is_gone_already() -> None:
    assert unused(0.5, 0.0) == 0.5
    assert unused(0.5, 15.0) == 0.25
    assert unused(0.5, 30.0) == unused(0.5, 3e9) == 0.0
    assert unused(0.5, -1.0) == 0.5


@given(limit=st.integers(1, 100), num_gateways=st.integers(1, 64))
def test_parts_of_open_requests_are_the_whole(limit: int, num_gateways: int) -> None:
    names = [f"gateway-{number}" for number in range(num_gateways)]
    parts = [share_of_open(limit, names, name) for name in names]
    assert sum(parts) == limit
    assert max(parts) - min(parts) <= 1
    assert share_of_open(limit, names, "later") == 0
    assert share_of_open(limit, (), "") == limit


class PlainBucket:
    """A bucket that pays back for every key at every call."""

    def __init__(self, keys: list[str], limit: float) -> None:
        self.limit, self.owed, self.at_s = limit, dict.fromkeys(keys, 0.0), 0.0

    def pay_back(self, now: float) -> None:
        paid, self.at_s = max(0.0, now - self.at_s) * self.limit / 60.0, max(now, self.at_s)
        self.owed = {key: max(0.0, one - paid) for key, one in self.owed.items()}

    def take(self, key: str, cost: float) -> bool:
        owed = max(0.0, self.owed[key] + cost)
        is_let_in = cost <= 0.0 or owed <= self.limit + 1e-9
        if is_let_in:
            self.owed[key] = owed
        return is_let_in


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_bucket_owes_what_a_plain_one_does(seed: int) -> None:
    rng = random.Random(seed)
    keys, now = list("abcd"[: rng.randrange(1, 5)]), 0.0
    bucket, plain = Bucket(1.0, now), PlainBucket(keys, 1.0)
    for _ in range(60):
        now += rng.choice([0.0, 0.25, 3.0, 40.0, -1.0])
        plain.pay_back(now)
        match rng.randrange(6):
            case 0:
                plain.limit = rng.choice([0.0, 0.25, 1.0])
                bucket.set_limit(plain.limit, now)
            case 1:
                more = Owed(0.125, {rng.choice(keys): 0.5}) if rng.random() < 0.5 else Owed(-0.25)
                plain.owed = {
                    key: max(0.0, one + (more.of(key) if more.least > 0.0 else more.least))
                    for key, one in plain.owed.items()
                }
                bucket.add(more, now)
            case 2:
                plain.owed = {key: max(one, plain.limit) for key, one in plain.owed.items()}
                bucket.use_up(now)
            case _:
                key, cost = rng.choice(keys), rng.choice([1 / 6, 1 / 60, 0.0])
                assert (bucket.take((Charge(key, cost),), now).wait_s == 0.0) == plain.take(key, cost)
        owed = bucket.owed(now)
        assert [owed.of(key) for key in keys] == pytest.approx(list(plain.owed.values()), abs=1e-6)

"""Whatever is late, lost, paused or restarted: keys get what their limits allow, and hardly more."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.keys.quotas import LEASE_S, Bucket, Charge, OwnRequests, QuotaPool, Taken, share_of_open, unused

LIMIT = 12
_STEP_S = 0.1


@dataclass
class PlainBucket:
    """A bucket that is told of each request at its time: let in, and perhaps given back later."""

    limit: float
    owed: float = 0.0
    at_s: float = 0.0

    def at(self, now: float) -> float:
        self.owed, self.at_s = max(0.0, self.owed - (now - self.at_s) * self.limit / 60.0), now
        return self.owed

    def let_in(self, cost: float, now: float, slack: float = 0.0) -> None:
        """Count a request. A key that owes nothing is let in, whatever the cost."""
        self.owed = self.at(now) + cost
        assert self.owed <= max(self.limit, cost) + slack + 1e-6

    def give_back(self, cost: float, now: float) -> None:
        self.owed = max(0.0, self.at(now) - cost)


@dataclass
class Gateway:
    name: str
    share: float
    clock_s: float  # its clock less the true time
    own: OwnRequests
    alone: PlainBucket  # of key "a", counted without the server
    is_cut_off: bool = False
    paused_until_s: float = 0.0
    asked_s: float = -1.0


@dataclass
class Ask:
    """A request of a key, or a sign of life, until it is let in or refused."""

    gateway: Gateway
    charges: tuple[Charge, ...]
    told: tuple[Charge, ...] = ()
    seen_s: float | None = None
    arrives_s: float = 0.0
    answered_s: float | None = None  # when the answer arrives
    clock_s: float = 0.0
    taken: Taken | None = None


@dataclass
class World:
    """Gateways and a state server, and messages between them that take their time."""

    rng: random.Random
    num_gateways: int
    max_delay_s: float
    has_restarts: bool = False
    gives_back: bool = False
    now: float = 100.0
    asks: list[Ask] = field(default_factory=list)
    returns: list[tuple[float, Gateway, float, float]] = field(default_factory=list)
    paused_until_s: float = 0.0
    server_clock_s: float = 500.0
    num_fresh: int = 0

    def __post_init__(self) -> None:
        self.pool = QuotaPool()
        self.together = PlainBucket(1.0)  # of key "a", counted by this server
        self.plain = PlainBucket(1.0)  # of key "a", all that was let in
        self.is_exact = self.num_gateways == 1 and not self.has_restarts
        self.slack = (LEASE_S / 5 + _STEP_S + 2 * self.max_delay_s) / 60.0  # as long as an answer is of old
        self.gateways = [self.process(f"gateway-{number}") for number in range(self.num_gateways)]

    def process(self, name: str) -> Gateway:
        clock_s, share = self.rng.uniform(-50.0, 50.0), 1.0 / self.num_gateways
        own = OwnRequests(share, self.now + clock_s)
        return Gateway(name, share, clock_s, own, PlainBucket(share))

    def step(self, load: float) -> None:
        self.now += _STEP_S
        if self.now >= self.paused_until_s:
            self.serve()
        for gateway in self.gateways:
            if self.now < gateway.paused_until_s:
                continue
            self.hear(gateway)
            self.give_back(gateway)
            if self.rng.random() < load:
                self.ask(gateway, Charge("a", self.rng.choice((1, 1, 3, 6)) / LIMIT))
            if self.rng.random() < 0.02:
                self.num_fresh += 1
                self.ask(gateway, Charge(f"fresh-{self.num_fresh}", self.rng.choice((1, LIMIT)) / LIMIT))
            if self.now - gateway.asked_s > LEASE_S / 5:
                gateway.asked_s = self.now
                self.send(Ask(gateway, ()))

    def ask(self, gateway: Gateway, charge: Charge) -> None:
        ask = Ask(gateway, (charge,))
        if gateway.own.seconds_leased(self.now + gateway.clock_s) > 0.0:
            self.send(ask)
        else:
            self.decide_alone(ask)

    def send(self, ask: Ask) -> None:
        gateway = ask.gateway
        ask.told = gateway.own.for_server(ask.charges, self.now + gateway.clock_s)
        ask.seen_s, ask.answered_s, ask.taken = gateway.own.seen_s, None, None
        ask.arrives_s = float("inf") if gateway.is_cut_off else self.now + self.rng.uniform(0.0, self.max_delay_s)
        self.asks.append(ask)

    def serve(self) -> None:
        for ask in self.asks:
            if ask.answered_s is None and ask.arrives_s <= self.now:
                ask.clock_s = self.now + self.server_clock_s
                ask.taken = self.pool.on_call(ask.seen_s, ask.told, ask.clock_s)
                if ask.taken is not None and not ask.taken.wait_s:
                    self.counted(ask)
                delay_s = float("inf") if ask.gateway.is_cut_off else self.rng.uniform(0.0, self.max_delay_s)
                ask.answered_s = self.now + delay_s

    def counted(self, ask: Ask) -> None:
        for key, cost, _ in ask.told:
            if key == "a" and cost > 0.0:
                self.together.let_in(cost, self.now)
            elif key == "a":
                self.together.give_back(-cost, self.now)

    def hear(self, gateway: Gateway) -> None:
        """Take answers in, and give up waiting where the lease is over."""
        now = self.now + gateway.clock_s
        answered = [ask for ask in self.asks if ask.gateway is gateway and (ask.answered_s or 1e9) <= self.now]
        for ask in answered:
            self.asks.remove(ask)
            gateway.own.on_answer(ask.clock_s, now)
            if ask.taken is None:
                self.send(ask)
            elif ask.charges:
                self.decided(ask, ask.taken, is_alone=False)
        if gateway.own.seconds_leased(now) > 0.0:
            return
        for ask in [ask for ask in self.asks if ask.gateway is gateway and ask.charges and ask.charges[0].cost > 0.0]:
            ask.arrives_s = ask.arrives_s if ask.answered_s is None else 0.0
            self.asks.remove(ask)
            late = Ask(gateway, (), ask.told, ask.seen_s, ask.arrives_s, ask.answered_s, ask.clock_s, ask.taken)
            self.asks.append(late)  # it may still arrive; its answer is only a sign of life
            self.decide_alone(ask)

    def decide_alone(self, ask: Ask) -> None:
        self.decided(ask, ask.gateway.own.take(ask.charges, self.now + ask.gateway.clock_s), is_alone=True)

    def decided(self, ask: Ask, taken: Taken, *, is_alone: bool) -> None:
        gateway, (key, cost, _) = ask.gateway, ask.charges[0]
        if cost <= 0.0:
            return
        if key != "a":
            assert not taken.wait_s, "a key that has used nothing is refused"
            return
        if taken.wait_s:
            if self.is_exact and not self.gives_back:
                owed = (
                    self.plain.at(self.now) + (0.0 if is_alone else self.now - ask.clock_s + self.server_clock_s) / 60.0
                )
                unheard = sum(one.told[0].cost for one in self.asks if one.told and one.taken and not one.taken.wait_s)
                assert owed + unheard + cost > 1.0 - self.slack, "refused below the limit"
            return
        if is_alone:
            gateway.alone.let_in(cost, self.now)
        else:
            gateway.own.note(ask.charges, self.now + gateway.clock_s)
        self.plain.let_in(cost, self.now, self.slack if self.is_exact else float("inf"))
        if self.gives_back and self.rng.random() < 0.5:
            self.returns.append((self.now + self.rng.uniform(0.0, 20.0), gateway, cost * self.rng.random(), self.now))

    def give_back(self, gateway: Gateway) -> None:
        for due in [due for due in self.returns if due[0] <= self.now and due[1] is gateway]:
            self.returns.remove(due)
            cost = unused(due[2], self.now - due[3])
            gateway.own.note((Charge("a", -cost),), self.now + gateway.clock_s)
            gateway.alone.give_back(cost, self.now)
            self.plain.give_back(cost, self.now)
            if gateway.own.seconds_leased(self.now + gateway.clock_s) > 0.0:
                self.send(Ask(gateway, (Charge("a", -cost),)))

    def fault(self, kind: int) -> None:
        gateway = self.rng.choice(self.gateways)
        match kind:
            case 0:
                gateway.is_cut_off ^= True
            case 1:
                gateway.paused_until_s = self.now + self.rng.choice((1.0, 3.5, 10.0))
            case 2:
                self.paused_until_s = self.now + self.rng.choice((1.0, 3.5, 10.0))
            case 3:
                self.gateways[self.gateways.index(gateway)] = self.process(gateway.name)
            case _:
                self.asks.clear()
                self.server_clock_s = self.rng.uniform(-60.0, 900.0)
                self.pool, self.together = QuotaPool(), PlainBucket(1.0)
                for each in self.gateways:
                    each.own.on_new_link()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num_gateways=st.sampled_from([1, 1, 2, 4]),
    max_delay_s=st.sampled_from([0.0, 0.3, 1.5]),
    fault_rate=st.sampled_from([0.0, 0.01, 0.05]),
    has_restarts=st.booleans(),
    gives_back=st.booleans(),
)
def test_keys_get_their_limit_and_hardly_more(
    seed: int, num_gateways: int, max_delay_s: float, fault_rate: float, has_restarts: bool, gives_back: bool
) -> None:
    """Never more than the limit by the server, and than a share by each gateway alone; never a refusal of a key that
    used nothing. With one gateway both counts are the same, whatever pauses."""
    rng = random.Random(seed)
    world = World(rng, num_gateways, max_delay_s, has_restarts, gives_back)
    for _ in range(600):
        if rng.random() < fault_rate:
            world.fault(rng.randrange(5 if has_restarts else 3))
        world.step(load=rng.choice((0.0, 0.2, 0.9)))


def of_six(count: float) -> float:
    """Return the part of a limit of six."""
    return count / 6.0


ONE = (Charge("a", of_six(1.0)),)


@pytest.mark.parametrize("paused_s", [3.5, 10.0])
def test_a_pause_costs_a_key_nothing(paused_s: float) -> None:
    """One gateway; the state server pauses, and later it is the gateway that does."""
    pool, own, now = QuotaPool(), OwnRequests(1.0, 0.0), 0.0

    def asked(cost: float) -> Taken | None:
        charges = own.for_server((Charge("a", cost),), now)
        taken = pool.on_call(own.seen_s, charges, now)
        own.on_answer(now, now)
        if taken is not None and not taken.wait_s:
            own.note(charges, now)
        return taken

    assert asked(0.5) is None  # its first call has seen no answer
    taken = asked(0.5)
    assert taken is not None
    assert taken.owed == (0.5,)
    call = own.seen_s, own.for_server(ONE, now)
    now += paused_s
    assert own.seconds_leased(now) == 0.0
    assert own.take((Charge("a", 0.1),), now).owed == pytest.approx((0.6 - paused_s / 60.0,))
    assert pool.on_call(*call, now) is None  # it came while the server paused
    asked(0.0)
    for _ in range(2):  # the second time after a pause of both
        taken = asked(0.0)
        assert taken is not None
        assert taken.owed == pytest.approx((0.6 - now / 60.0,))
        now += paused_s
        assert asked(0.0) is None


def test_a_server_that_begins_anew_knows_what_gateways_let_in() -> None:
    own = OwnRequests(1.0, 0.0)
    own.note((Charge("a", 0.75),), 0.0)
    taken = QuotaPool().on_call(7.0, own.for_server(ONE, 0.0), 7.0)
    assert taken is not None
    assert taken.owed == pytest.approx((0.75 + of_six(1.0),))


def test_alone_a_gateway_has_its_share_and_what_it_let_in_counts() -> None:
    own = OwnRequests(0.5, 0.0)
    own.note((Charge("a", 0.9),), 0.0)
    assert own.take(ONE, 0.0).wait_s == pytest.approx(20.0)  # a sixth of the minute for one request, by half a limit
    assert own.take((Charge("another", 1.0),), 0.0).wait_s == 0.0


def test_of_several_charges_all_are_counted_or_none() -> None:
    bucket = Bucket(1.0)
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
    assert sum(parts) == max(limit, num_gateways)
    assert max(parts) - min(parts) <= 1
    assert share_of_open(limit, names, "later") == 0
    assert share_of_open(limit, (), "") == limit

"""Requests and tokens per minute of each key, counted together for all gateways, and never more than allowed.

A limit is a bucket: it owes for each request what that costs, at most the whole limit, and pays back evenly, all of
it in a minute. Costs are parts of a key's own limit (one of 60 requests: 1/60), so that one bucket has all keys,
whatever their limits, and goes on when these change. Every gateway that is there from the start owns an equal share of
the limits. While a gateway is a member, its share is in the pool of the state server, which counts for it; otherwise it
counts against its share alone.

1. A gateway calls several times a second. The state server's answers carry its time, and the next call the time of the
   latest answer that has arrived: so the state server knows that the gateway has heard that it was a member then.
2. A gateway that has had no answer for LEASE_S is on its own; the state server counts it out as long after the last
   answer that it knows to have arrived, which is no later, however long messages take.
3. A share leaves the pool as used up, and what the pool owes becomes less by as much. A share comes back with what it
   owes. So what is owed in all never falls short of what was let in, and no part ever owes more than it may.
4. What a request did not use of its tokens is given back, less what would have been paid back since (`unused`).

After a restart of either side, what cannot be known is taken as used up. Times are those of each side's own clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEASE_S = 2.0
MAX_CHARGES = 4  # of one call
MAX_TOLD = 4096  # keys whose debts are told one by one; of more all is taken as used up
_MINUTE_S = 60.0
_ROUNDING = 1e-9


class Charge(NamedTuple):
    """What a request costs one limit of one key."""

    key: str  # names the limit and the key
    cost: float  # part of the limit; below zero: given back


class Owed(NamedTuple):
    """What is owed: by each key at least the one, and its own where that is more."""

    least: float = 0.0
    by_key: Mapping[str, float] = {}

    def of(self, key: str) -> float:
        """Return what this key owes."""
        return max(self.least, self.by_key.get(key, 0.0))

    def at_most(self, limit: float) -> "Owed":
        """Return the same with no more than this for any key."""
        return Owed(min(self.least, limit), {key: min(owed, limit) for key, owed in self.by_key.items()})


class Taken(NamedTuple):
    """Whether charges were counted, and what their keys owe after that."""

    wait_s: float  # 0.0: counted; otherwise how long until they could be
    owed: tuple[float, ...] = ()
    limit: float = 0.0  # that they may owe, as parts of their whole limits


def unused(cost: float, seconds: float) -> float:
    """Return what may be given back of a part of a charge that turned out to be too much, so long after it.

    A bucket pays back a whole limit in a minute, also what need not have been charged: that much is gone already.
    """
    return max(0.0, cost - max(0.0, seconds) / _MINUTE_S)


def share_of_open(limit: int, gateways: Sequence[str], gateway: str) -> int:
    """Return how many requests of a key may be open at this gateway, so that all together have no more than `limit`.

    Without other gateways it is all of them; one that joined later has none.
    """
    if not gateways:
        return limit
    if gateway not in gateways:
        return 0
    each, more = divmod(limit, len(gateways))
    return each + (sorted(gateways).index(gateway) < more)


class Bucket:
    """What one part of the limits owes, by key. A request costs the same time however many keys there are."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._at_s = now
        self._paid = 0.0  # by a key that has always owed
        self._owed: dict[str, tuple[float, float]] = {}  # by key: what it owed, and what had been paid by then
        self._least = (0.0, 0.0)  # the same of what each key owes at least

    def set_limit(self, limit: float, now: float) -> None:
        self._pay_back(now)
        self._limit = limit

    def add(self, more: Owed, now: float) -> None:
        before = self.owed(now)
        least = max(0.0, before.least + more.least)
        sums = {}
        for key in before.by_key.keys() | more.by_key.keys():
            sums[key] = max(0.0, before.of(key) + (more.of(key) if more.least >= 0.0 else more.least))
        self._owed = {key: (total, self._paid) for key, total in sums.items() if total > least}
        self._least = (least, self._paid)

    def use_up(self, now: float) -> None:
        self._pay_back(now)
        self._least = (max(self._left(*self._least), self._limit), self._paid)

    def owed(self, now: float) -> Owed:
        self._pay_back(now)
        least = self._left(*self._least)
        all_owed = {key: self._left(*own) for key, own in self._owed.items()}
        return Owed(least, {key: owed for key, owed in all_owed.items() if owed > least})

    def take(self, charges: Sequence[Charge], now: float) -> Taken:
        self._pay_back(now)
        least, over = self._left(*self._least), 0.0
        owed = []
        for key, cost in charges:
            own = self._owed.get(key)
            owes = least if own is None else max(least, own[0] - (self._paid - own[1]))
            owed.append(owes)
            if cost > 0.0:
                over = max(over, owes + cost - self._limit)
        if over > _ROUNDING:
            wait_s = over * _MINUTE_S / self._limit if self._limit > 0.0 else _MINUTE_S
            return Taken(wait_s, tuple(owed), self._limit)
        for place, (key, cost) in enumerate(charges):
            if cost:
                owed[place] = max(0.0, owed[place] + cost)
                self._owed[key] = (owed[place], self._paid)
        return Taken(0.0, tuple(owed), self._limit)

    def _pay_back(self, now: float) -> None:
        self._paid += max(0.0, now - self._at_s) * self._limit / _MINUTE_S
        self._at_s = max(now, self._at_s)

    def _left(self, owed: float, paid: float) -> float:
        return max(0.0, owed - (self._paid - paid))


@dataclass(slots=True)
class _Known:
    process_id: str
    seen_s: float = float("-inf")  # the latest of this side's times that it has seen
    is_member: bool = False
    may_have_used: bool = False  # its share, as another process or before it was known: as used up


@dataclass(frozen=True, slots=True)
class QuotaCall:
    """A gateway's call."""

    gateway: str
    process_id: str
    seen_s: float | None
    spent: Owed | None  # of its share, by key; None: all of it, by each
    charges: tuple[Charge, ...] = ()


class QuotaPool:
    """The shares of all members, as the state server counts them. Its clock is its own."""

    def __init__(self, owners: Sequence[str], now: float) -> None:
        """`owners`: the gateways that own shares. Later ones may use the pool, and bring nothing to it."""
        self._share = 1.0 / len(owners) if owners else 0.0
        self._owners = frozenset(owners)
        self._bucket = Bucket(0.0, now)
        self._known: dict[str, _Known] = {}
        self._looked_for_s = now  # no member is silent for too long before that

    def is_member(self, gateway: str) -> bool:
        """Return whether this gateway is counted here."""
        return gateway in self._known and self._known[gateway].is_member

    def on_call(self, call: QuotaCall, now: float) -> Taken:
        """Count the charges of a call, if it has any."""
        known = self._known.setdefault(call.gateway, _Known(call.process_id))
        if known.process_id != call.process_id:
            known.process_id, known.may_have_used = call.process_id, True
        if call.seen_s is not None:
            known.seen_s = max(known.seen_s, min(call.seen_s, now))
        self._count_out(now)
        if not known.is_member and now - known.seen_s < LEASE_S:
            self._take_in(call, known, now)
        if not known.is_member:
            return Taken(LEASE_S if call.charges else 0.0)
        return self._bucket.take(call.charges, now)

    def _take_in(self, call: QuotaCall, known: _Known, now: float) -> None:
        known.is_member = True
        share = self._share_of(call.gateway)
        is_used_up = known.may_have_used or call.spent is None
        spent = Owed(share) if call.spent is None or is_used_up else call.spent.at_most(share)
        known.may_have_used = False
        self._bucket.add(spent, now)
        self._set_limit(now)
        self._looked_for_s = min(self._looked_for_s, known.seen_s + LEASE_S)

    def _count_out(self, now: float) -> None:
        if now < self._looked_for_s:
            return
        for gateway, known in self._known.items():
            if known.is_member and now - known.seen_s >= LEASE_S:
                known.is_member = False
                self._bucket.add(Owed(-self._share_of(gateway)), now)
                self._set_limit(now)
        seen_s = (known.seen_s for known in self._known.values() if known.is_member)
        self._looked_for_s = min(seen_s, default=now) + LEASE_S

    def _set_limit(self, now: float) -> None:
        num_shares = sum(known.is_member and gateway in self._owners for gateway, known in self._known.items())
        self._bucket.set_limit(num_shares * self._share, now)

    def _share_of(self, gateway: str) -> float:
        return self._share if gateway in self._owners else 0.0


class OwnShare:
    """A gateway's side: whether it is counted elsewhere, and its share for while it is not. Its clock is its own."""

    def __init__(self, share: float, process_id: str, now: float, *, is_alone: bool = False) -> None:
        """Begin with an unused share, as the only gateway. `is_alone`: it never calls."""
        self._is_alone = is_alone
        self._bucket = Bucket(share, now)
        self._let_in = Bucket(share, now)  # by this process, before it was a member
        self._process_id = process_id
        self._seen_s: float | None = None
        self._heard_s: float | None = None  # on this clock; None: not leased
        self._is_unknown = False  # what is owed for the share: taken as all of it
        self._is_told = False  # what was spent, by a call within this lease: later ones tell that all is used up

    def begin_used_up(self, now: float, *, is_first_process: bool) -> None:
        """Begin used up: the pool or an earlier process may have used the share. The first process has let in none."""
        self._bucket.use_up(now)
        self._is_unknown = not is_first_process

    def call(self, gateway: str, charges: tuple[Charge, ...], now: float) -> QuotaCall:
        """Return the call for charges, or for a sign of life alone."""
        self._look(now)
        spent = None if self._is_told else (self._bucket if self._is_unknown else self._let_in).owed(now)
        if spent is not None and len(spent.by_key) > MAX_TOLD:
            spent = None
        if self._heard_s is not None:  # from the arrival of this call on it may be a member
            self._lose_track(now)
            self._is_told = True
        return QuotaCall(gateway, self._process_id, self._seen_s, spent, charges)

    def on_answer(self, clock_s: float, now: float) -> None:
        """Take note of an answer: from now on the share is not used here, for LEASE_S."""
        self._look(now)
        self._seen_s = clock_s if self._seen_s is None else max(self._seen_s, clock_s)
        self._heard_s = now

    def on_new_link(self, now: float) -> None:
        """Forget the times of a state server that may be another process now; the lease ends as it would have."""
        self._look(now)
        self._seen_s, self._is_told = None, False
        if self._heard_s is not None:
            self._lose_track(now)

    def seconds_leased(self, now: float) -> float:
        """Return how long this gateway still has to leave its share alone; 0.0: it is on its own."""
        self._look(now)
        return 0.0 if self._heard_s is None else LEASE_S - (now - self._heard_s)

    def take(self, charges: tuple[Charge, ...], now: float) -> Taken:
        """Count charges against the share, all or none."""
        assert self.seconds_leased(now) == 0.0, "a share used while it is in the pool"
        taken = self._bucket.take(charges, now)
        if not taken.wait_s and not self._is_alone:
            self._let_in.take(charges, now)
        return taken

    def _look(self, now: float) -> None:
        if self._heard_s is not None and now - self._heard_s >= LEASE_S:
            self._heard_s, self._is_told = None, False
            self._lose_track(now)

    def _lose_track(self, now: float) -> None:
        self._is_unknown = True
        self._bucket.use_up(now)

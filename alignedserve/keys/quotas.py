"""Requests and tokens per minute of each key, counted together for all gateways.

A limit is a bucket: it owes for each request what that costs, at most the whole limit, and pays back evenly, all of
it in a minute. Costs are parts of a key's own limit (one of 60 requests: 1/60), so that one bucket has all keys,
whatever their limits, and goes on when these change.

1. The state server has the bucket of all gateways. A gateway asks it for each request, and says what its own requests
   of the key owe: the server's count is never below, also where the server was away or begins anew.
2. A gateway without an answer for LEASE_S counts alone, against an equal share of each limit. Its own requests before
   count too, up to the share. A key that owes it nothing is always let in.
3. The server counts no call from before LEASE_S, as its gateway may have counted it alone. Answers carry the server's
   time, and calls the time of the latest answer: no two clocks are compared.
4. What a request did not use of its tokens is given back, less what would have been paid back since (`unused`).

So all gateways let in no more than the limit, and each gateway that is cut off no more than its share beside it. With a
single gateway the share is the whole limit, and both counts are the same: no pause of either side costs a key anything.
"""

from collections.abc import Sequence
from typing import NamedTuple

LEASE_S = 2.0
MAX_CHARGES = 4  # of one call
_MINUTE_S = 60.0
_ROUNDING = 1e-9


class Charge(NamedTuple):
    """What a request costs one limit of one key."""

    key: str  # names the limit and the key
    cost: float  # part of the limit; below zero: given back
    owed: float = 0.0  # by earlier requests at the same gateway


class Taken(NamedTuple):
    """Whether charges were counted, and what their keys owe after that."""

    wait_s: float  # 0.0: counted; otherwise how long until they could be
    owed: tuple[float, ...] = ()
    limit: float = 1.0  # that they may owe, as parts of their whole limits


def unused(cost: float, seconds: float) -> float:
    """Return what may be given back of a part of a charge that turned out to be too much, so long after it.

    A bucket pays back a whole limit in a minute, also what need not have been charged: that much is gone already.
    """
    return max(0.0, cost - max(0.0, seconds) / _MINUTE_S)


def share_of_open(limit: int, gateways: Sequence[str], gateway: str) -> int:
    """Return how many requests of a key may be open at a gateway that counts alone: an equal part, one at least.

    A single gateway has the whole limit, and a gateway that joined later nothing.
    """
    if not gateways:
        return limit
    if gateway not in gateways:
        return 0
    each, more = divmod(limit, len(gateways))
    return max(1, each + (sorted(gateways).index(gateway) < more))


class Bucket:
    """The debts of keys, each paid back at a constant rate. Charging takes the same time however many there are."""

    def __init__(self, limit: float) -> None:
        """`limit`: the highest debt, which a key pays back in a minute."""
        self._limit = limit
        self._owed: dict[str, tuple[float, float]] = {}  # by key: what it owed, and when

    def owed(self, key: str, now: float) -> float:
        owed, at_s = self._owed.get(key, (0.0, now))
        return max(0.0, owed - max(0.0, now - at_s) * self._limit / _MINUTE_S)

    def set_owed(self, key: str, owed: float, now: float) -> None:
        _, at_s = self._owed.get(key, (0.0, now))
        self._owed[key] = (owed, max(at_s, now))

    def take(self, charges: Sequence[Charge], now: float) -> Taken:
        """Count all charges or none. A key that owes nothing is always let in."""
        owed = [self.owed(charge.key, now) for charge in charges]
        over = 0.0
        for owes, charge in zip(owed, charges, strict=True):
            if charge.cost > 0.0:
                over = max(over, min(owes, owes + charge.cost - self._limit))
        if over > _ROUNDING:
            return Taken(over * _MINUTE_S / self._limit, tuple(owed), self._limit)
        for index, charge in enumerate(charges):
            if charge.cost:
                owed[index] = max(0.0, owed[index] + charge.cost)
                self.set_owed(charge.key, owed[index], now)
        return Taken(0.0, tuple(owed), self._limit)

    def note(self, charges: Sequence[Charge], now: float) -> None:
        """Count charges that were let in elsewhere. For them a key owes no more than the limit."""
        for charge in charges:
            owed = self.owed(charge.key, now)
            self.set_owed(charge.key, max(0.0, min(owed + charge.cost, max(owed, self._limit))), now)


class QuotaPool:
    """The requests of all gateways, as the state server counts them. Its clock is its own."""

    def __init__(self) -> None:
        self._bucket = Bucket(1.0)

    def on_call(self, seen_s: float | None, charges: Sequence[Charge], now: float) -> Taken | None:
        """Count the charges of a call, if it has any. `seen_s`: the time in the latest answer that its gateway had.

        None: the call may be old, and nothing was counted.
        """
        if seen_s is None or not 0.0 <= now - seen_s < LEASE_S:
            return None
        for charge in charges:
            owed = charge.owed - (now - seen_s) / _MINUTE_S  # paid back on the way
            if owed > self._bucket.owed(charge.key, now):
                self._bucket.set_owed(charge.key, owed, now)
        return self._bucket.take(charges, now)


class OwnRequests:
    """A gateway's side: whether the state server counts for it, and its own requests. Its clock is its own."""

    def __init__(self, share: float, now: float) -> None:
        """`share`: of each limit, while it counts alone. It begins by asking the server."""
        self._all = Bucket(1.0)
        self._alone = Bucket(share)
        self._heard_s = now
        self.seen_s: float | None = None  # the server's time in its latest answer

    def seconds_leased(self, now: float) -> float:
        """Return how long it waits for the server; 0.0: it counts alone."""
        return max(0.0, LEASE_S - (now - self._heard_s))

    def on_answer(self, clock_s: float, now: float) -> None:
        self.seen_s, self._heard_s = clock_s, now

    def on_new_link(self) -> None:
        """Forget the time of a server that may be another process now."""
        self.seen_s = None

    def for_server(self, charges: Sequence[Charge], now: float) -> tuple[Charge, ...]:
        return tuple(charge._replace(owed=self._all.owed(charge.key, now)) for charge in charges)

    def note(self, charges: Sequence[Charge], now: float) -> None:
        """Note charges that the server has counted."""
        self._all.note(charges, now)
        self._alone.note(charges, now)

    def take(self, charges: Sequence[Charge], now: float) -> Taken:
        """Count charges alone, all or none."""
        taken = self._alone.take(charges, now)
        if not taken.wait_s:
            self._all.note(charges, now)
        return taken

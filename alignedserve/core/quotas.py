"""Requests per minute of each key, counted together for all gateways, and never more than allowed.

A limit is a bucket: it owes a request for each that is let in, at most `limit` of them, and pays back evenly, all of
them in a minute. Every gateway that is there from the start owns an equal share of the limit. While a gateway is a
member, its share is in the pool of the state server, which counts for it; otherwise it counts against its share alone.

1. A gateway calls several times a second. The state server's answers carry its time, and the next call the time of the
   latest answer that has arrived: so the state server knows that the gateway has heard that it was a member then.
2. A gateway that has had no answer for LEASE_S is on its own; the state server counts it out as long after the last
   answer that it knows to have arrived, which is no later, however long messages take.
3. A share leaves the pool as used up, and what the pool owes becomes less by as much. A share comes back with what it
   owes. So what is owed in all never falls short of what was let in, and no part ever owes more than it may.

After a restart of either side, what cannot be known is taken as used up. Times are those of each side's own clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEASE_S = 2.0
_MINUTE_S = 60.0


class Bucket:
    """Requests that one part of a limit owes, by key. A request costs the same however many keys there are."""

    def __init__(self, num_keys: int, limit: float, now: float) -> None:
        self._num_keys = num_keys
        self._limit = limit
        self._at_s = now
        self._paid = 0.0  # by a key that has always owed
        self._owed: dict[int, tuple[float, float]] = {}  # by key: what it owed, and what had been paid by then
        self._least = (0.0, 0.0)  # the same of what each key owes at least

    def set_limit(self, limit: float, now: float) -> None:
        """Change the limit from now on; what is owed stays."""
        self._pay_back(now)
        self._limit = limit

    def add(self, owed: Sequence[float], now: float) -> None:
        """Owe more (or less, down to nothing)."""
        sums = [max(0.0, total + more) for total, more in zip(self.owed(now), owed, strict=True)]
        self._owed = {number: (total, self._paid) for number, total in enumerate(sums) if total}
        self._least = (0.0, self._paid)

    def use_up(self, now: float) -> None:
        """Owe as much as there may be."""
        self._pay_back(now)
        self._least = (max(self._left(*self._least), self._limit), self._paid)

    def owed(self, now: float) -> tuple[float, ...]:
        """Return what is owed by each key."""
        self._pay_back(now)
        return tuple(map(self._owed_by, range(self._num_keys)))

    def take(self, key_number: int, now: float) -> float:
        """Count one request: 0.0, or the seconds until it could be counted, where it is not."""
        self._pay_back(now)
        owed = self._owed_by(key_number) + 1.0
        over = owed - self._limit
        if over > 1e-9:
            return over * _MINUTE_S / self._limit if self._limit > 0.0 else _MINUTE_S
        self._owed[key_number] = (owed, self._paid)
        return 0.0

    def _pay_back(self, now: float) -> None:
        self._paid += max(0.0, now - self._at_s) * self._limit / _MINUTE_S
        self._at_s = max(now, self._at_s)

    def _owed_by(self, key_number: int) -> float:
        own = self._owed.get(key_number)
        least = self._left(*self._least)
        return least if own is None else max(least, self._left(*own))

    def _left(self, owed: float, paid: float) -> float:
        return max(0.0, owed - (self._paid - paid))


@dataclass(slots=True)
class _Known:
    """A gateway that has called."""

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
    spent: tuple[float, ...]  # of its share, by key; none: all of it, by each
    key_number: int | None = None


class QuotaPool:
    """The shares of all members, as the state server counts them. Its clock is its own."""

    def __init__(self, requests_per_minute: int, num_keys: int, owners: Sequence[str], now: float) -> None:
        """`owners`: the gateways that own shares. Later ones may use the pool, and bring nothing to it."""
        self._share = requests_per_minute / len(owners) if owners else 0.0
        self.num_keys = num_keys
        self._owners = frozenset(owners)
        self._bucket = Bucket(num_keys, 0.0, now)
        self._known: dict[str, _Known] = {}
        self._looked_for_s = now  # no member is silent for too long before that

    def is_member(self, gateway: str) -> bool:
        """Return whether this gateway is counted here."""
        return gateway in self._known and self._known[gateway].is_member

    def on_call(self, call: QuotaCall, now: float) -> float:
        """Count a request, where the call names a key; return the seconds that it has to wait (0.0: counted)."""
        known = self._known.setdefault(call.gateway, _Known(call.process_id))
        if known.process_id != call.process_id:
            known.process_id, known.may_have_used = call.process_id, True
        if call.seen_s is not None:
            known.seen_s = max(known.seen_s, min(call.seen_s, now))
        self._count_out(now)
        if not known.is_member and now - known.seen_s < LEASE_S and len(call.spent) in (0, self.num_keys):
            self._take_in(call, known, now)
        if not known.is_member or call.key_number is None or call.key_number >= self.num_keys:
            return LEASE_S if call.key_number is not None else 0.0
        return self._bucket.take(call.key_number, now)

    def _take_in(self, call: QuotaCall, known: _Known, now: float) -> None:
        known.is_member = True
        share = self._share_of(call.gateway)
        is_used_up = known.may_have_used or not call.spent
        spent = (share,) * self.num_keys if is_used_up else tuple(min(count, share) for count in call.spent)
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
                self._bucket.add((-self._share_of(gateway),) * self.num_keys, now)
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

    def __init__(self, share: float, num_keys: int, process_id: str, now: float) -> None:
        """Begin with an unused share, as the only gateway."""
        self._bucket = Bucket(num_keys, share, now)
        self._let_in = Bucket(num_keys, share, now)  # by this process, before it was a member
        self._process_id = process_id
        self._seen_s: float | None = None
        self._heard_s: float | None = None  # on this clock; None: not leased
        self._is_unknown = False  # what is owed for the share: taken as all of it
        self._is_told = False  # what was spent, by a call within this lease: later ones tell that all is used up

    def begin_used_up(self, now: float, *, is_first_process: bool) -> None:
        """Begin used up: the pool or an earlier process may have used the share. The first process has let in none."""
        self._bucket.use_up(now)
        self._is_unknown = not is_first_process

    def call(self, gateway: str, key_number: int | None, now: float) -> QuotaCall:
        """Return the call for a request of a key, or for a sign of life alone."""
        self._look(now)
        spent = () if self._is_told else (self._bucket if self._is_unknown else self._let_in).owed(now)
        if self._heard_s is not None:  # from the arrival of this call on it may be a member
            self._lose_track(now)
            self._is_told = True
        return QuotaCall(gateway, self._process_id, self._seen_s, spent, key_number)

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

    def take(self, key_number: int, now: float) -> float:
        """Count a request against the share: 0.0, or the seconds until it could be counted."""
        assert self.seconds_leased(now) == 0.0, "a share used while it is in the pool"
        wait_s = self._bucket.take(key_number, now)
        if not wait_s:
            self._let_in.take(key_number, now)
        return wait_s

    def _look(self, now: float) -> None:
        if self._heard_s is not None and now - self._heard_s >= LEASE_S:
            self._heard_s, self._is_told = None, False
            self._lose_track(now)

    def _lose_track(self, now: float) -> None:
        self._is_unknown = True
        self._bucket.use_up(now)

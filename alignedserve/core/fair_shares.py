"""Virtual token counters: who goes next where several tenants wait for the same thing (Sheng et al., OSDI '24).

Each tenant has a counter of the tokens that it has had, divided by its weight: `(prompt + 2 * answer) / weight`, as a
token of an answer takes about twice as much as one of a prompt. Of the tenants that wait, the one with the lowest
counter goes next; of equals, the one that came back last. Example: a has weight 2, b came after it and has weight 1,
both always wait, and each request costs 100. The counters of a and b after each turn are (0, 100), (50, 100),
(100, 100), (100, 200), (150, 200), (200, 200): b a a b a a, twice as many for a.

A tenant that has not waited comes back with at least the lowest counter of those that wait, or the counter of the last
one that did: it gets no credit for the time in which it asked for nothing, and goes first if it is not ahead.

With C the largest cost of one turn divided by its tenant's weight, the counters of two tenants that wait are never
further apart than C, and over any time in which both wait, what they get by weight differs by at most 2 C (paper, lemma
4.3 and theorem 4.4). A lead that the caller allows some turns is added to C (docs/fairness.md).
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

PROMPT_COST = 1.0  # of a token that is computed; those that are cached cost nothing
ANSWER_COST = 2.0
# Tenants whose counters are kept though they have and want nothing. Beyond, those least ahead are forgotten: they had
# little more than the others, and come back with as much as these.
MAX_IDLE_TENANTS = 4096
# Seconds for which a thing counts as shared after the last but one tenant has asked for it.
SHARED_S = 60.0


def cost_of(num_prompt_tokens: float, num_answer_tokens: float) -> float:
    """Return what a request costs, before it is divided by a weight."""
    return PROMPT_COST * num_prompt_tokens + ANSWER_COST * num_answer_tokens


@dataclass(slots=True)
class _Tenant:
    order: int  # where counters are equal; lower goes first
    weight: float
    counter: float
    num_waiting: int = 0
    num_held: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.num_waiting or self.num_held)


class FairShares:
    """The counters of the tenants that share one thing, such as the places of a class of requests."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting = self.lowest()
        self._num_come = 0
        self._last: str | None = None  # the last tenant that stopped to wait
        self._floor = 0.0  # its counter
        self._num_active = 0  # tenants that wait or hold something
        self._active_weight = 0.0  # of these
        self._num_held = 0  # by all
        self._latest: str | None = None  # the last tenant that asked
        self._latest_s = self._other_s = -math.inf  # when it did, and when another did

    def __len__(self) -> int:
        """Return how many tenants are known, idle ones included."""
        return len(self._tenants)

    def lowest(self) -> "Lowest":
        """Return an empty set of waiting tenants, of which the first by counter is wanted."""
        return Lowest(self._tenants)

    def is_shared(self, now: float) -> bool:
        """Return whether several tenants wait, or have asked within a minute; else there is nothing to share."""
        return now - self._other_s < SHARED_S or len(self._waiting) > 1

    @property
    def num_waiting(self) -> int:
        """Number of tenants that wait."""
        return len(self._waiting)

    @property
    def first(self) -> str | None:
        """The tenant whose turn it is, of those that wait."""
        return self._waiting.first

    def counter(self, tenant: str) -> tuple[float, int]:
        """Return a known tenant's place: lower goes first."""
        known = self._tenants[tenant]
        return known.counter, known.order

    def weight(self, tenant: str) -> float:
        """Return a known tenant's weight."""
        return self._tenants[tenant].weight

    def lead(self, tenant: str) -> float:
        """Return how far a known tenant's counter is beyond the lowest of those that wait; some must."""
        if len(self._waiting) == 1:
            return 0.0
        first = self._waiting.first
        assert first is not None, "a lead over nobody"
        return self._tenants[tenant].counter - self._tenants[first].counter

    def is_behind(self, tenant: str) -> bool:
        """Return whether a waiting tenant, with one more thing, holds no more than its share of all that is held.

        One that nobody shares with at this moment has all of it, and is behind nobody: others may come at any time.
        Example: tenants of weights 2, 1 and 1 hold 20, 11 and 3 things. The third's share of 35 is 8.75, and it would
        hold four: it is behind.
        """
        known = self._tenants[tenant]
        is_alone = self._num_active == 1
        return not is_alone and (known.num_held + 1) * self._active_weight <= known.weight * (self._num_held + 1)

    def wait(self, tenant: str, weight: float, now: float) -> None:
        """Count one more thing for which the tenant waits. `weight`: above 0; the latest one counts from now on."""
        if tenant != self._latest:
            self._latest, self._other_s = tenant, self._latest_s
        if now > self._latest_s:
            self._latest_s = now
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(0, weight, self._floor)
        if known.is_idle:
            self._num_active += 1
            self._active_weight += weight
        elif known.weight != weight:
            self._active_weight += weight - known.weight
        known.weight = weight
        known.num_waiting += 1
        if known.num_waiting > 1:
            return
        first = self._waiting.first
        known.counter = max(known.counter, self._floor if first is None else self._tenants[first].counter)
        self._num_come += 1
        known.order = -self._num_come
        self._waiting.add(tenant)

    def stop_waiting(self, tenant: str) -> bool:
        """Count one thing less, which the tenant got or no longer wants; return whether it waits for another."""
        known = self._tenants[tenant]
        known.num_waiting -= 1
        if known.num_waiting:
            return True
        self._waiting.discard(tenant)
        self._last, self._floor = tenant, known.counter
        if not known.num_held:
            self._become_idle(known)
        return False

    def hold(self, tenant: str) -> None:
        """Count one more thing that a tenant has, for which it waits until now."""
        self._tenants[tenant].num_held += 1
        self._num_held += 1

    def release(self, tenant: str) -> None:
        """Count one thing less that a tenant has."""
        known = self._tenants[tenant]
        known.num_held -= 1
        self._num_held -= 1
        if known.is_idle:
            self._become_idle(known)

    def charge(self, tenant: str, cost: float) -> None:
        """Add what a tenant gets (see `cost_of`), or give back what was charged too much: below 0."""
        known = self._tenants.get(tenant)
        if known is None:  # forgotten since
            return
        known.counter += cost / known.weight
        if tenant == self._last:
            self._floor = known.counter
        if cost < 0:
            self._waiting.lowered(tenant)

    def _become_idle(self, known: _Tenant) -> None:
        self._num_active -= 1
        self._active_weight = self._active_weight - known.weight if self._num_active else 0.0
        if len(self._tenants) - self._num_active > MAX_IDLE_TENANTS:
            self._forget()

    def _forget(self) -> None:
        idle = sorted((tenant.counter, tenant.order, name) for name, tenant in self._tenants.items() if tenant.is_idle)
        for _, _, name in idle[: len(idle) // 2]:
            del self._tenants[name]


class Lowest:
    """Waiting tenants, of which the first by counter is wanted: a heap whose top is brought up to date.

    A single one needs no heap: it is built when there is another.
    """

    def __init__(self, tenants: Mapping[str, _Tenant]) -> None:
        """`tenants`: their counters may rise at any time; `lowered` is told when one falls."""
        self._tenants = tenants
        self._heap: list[tuple[float, int, str]] = []
        self._members: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def first(self) -> str | None:
        members = self._members
        if len(members) < 2:
            return next(iter(members), None)
        heap, tenants = self._heap, self._tenants
        while True:
            entry = heap[0]
            tenant = entry[2]
            if tenant in members:
                known = tenants[tenant]
                now = (known.counter, known.order, tenant)
                if entry == now:
                    return tenant
                if entry < now:
                    heapq.heapreplace(heap, now)
                    continue
            heapq.heappop(heap)  # it left, or a lower entry of it is there

    def add(self, tenant: str) -> None:
        self._members[tenant] = None
        if len(self._members) == 2:
            self._build()
        else:
            self.lowered(tenant)

    def discard(self, tenant: str) -> None:
        self._members.pop(tenant, None)

    def lowered(self, tenant: str) -> None:
        """Note that the counter of a tenant has fallen, if it is a member."""
        if len(self._members) < 2 or tenant not in self._members:
            return
        if len(self._heap) > 4 * len(self._members) + 64:
            self._build()
        else:
            heapq.heappush(self._heap, self._entry(tenant))

    def _entry(self, tenant: str) -> tuple[float, int, str]:
        known = self._tenants[tenant]
        return known.counter, known.order, tenant

    def _build(self) -> None:
        self._heap = [self._entry(member) for member in self._members]
        heapq.heapify(self._heap)

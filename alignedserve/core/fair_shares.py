"""Virtual token counters: who goes next where several tenants wait for the same thing (Sheng et al., OSDI '24).

Each tenant has a counter of the tokens that it has had, divided by its weight: `(prompt + 2 * answer) / weight`, as a
token of an answer takes about twice as much as one of a prompt. Of the tenants that wait, the one with the lowest
counter goes next. Example: of weights 2 and 1, both always wait, and each request costs 100. The counters after each
turn are (50, 0), (50, 100), (100, 100), (150, 100), (150, 200), (200, 200): a b a a b a, twice as many for the first.

A tenant that has not waited comes back with at least the lowest counter of those that wait, or the counter of the last
one that did: it gets no credit for the time in which it asked for nothing.

With C the largest cost of one turn divided by its tenant's weight, the counters of two tenants that wait are never
further apart than C, and over any time in which both wait, what they get by weight differs by at most 2 C (paper, lemma
4.3 and theorem 4.4). A lead that the caller allows some turns is added to C (docs/fairness.md).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

PROMPT_COST = 1.0  # of a token that is computed; those that are cached cost nothing
ANSWER_COST = 2.0
# Tenants whose counters are kept though they do not wait. Beyond, those least ahead are forgotten: they had little more
# than the others, and come back with as much as these.
MAX_IDLE_TENANTS = 4096


def cost_of(num_prompt_tokens: float, num_answer_tokens: float) -> float:
    """Return what a request costs, before it is divided by a weight."""
    return PROMPT_COST * num_prompt_tokens + ANSWER_COST * num_answer_tokens


@dataclass(slots=True)
class _Tenant:
    number: int  # in order of coming; decides where counters are equal
    weight: float
    counter: float
    num_waiting: int = 0


class FairShares:
    """The counters of the tenants that share one thing, such as the places of a class of requests."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting = Lowest(self.counter)
        self._num_come = 0
        self._last: str | None = None  # the last tenant that stopped to wait
        self._floor = 0.0  # its counter

    def __len__(self) -> int:
        """Return how many tenants are known, those that do not wait included."""
        return len(self._tenants)

    @property
    def is_shared(self) -> bool:
        """True from the second tenant on; before, there is nothing to share."""
        return len(self._tenants) > 1

    @property
    def first(self) -> str | None:
        """The tenant whose turn it is, of those that wait."""
        return self._waiting.first

    def counter(self, tenant: str) -> tuple[float, int]:
        """Return a known tenant's place: lower goes first."""
        known = self._tenants[tenant]
        return known.counter, known.number

    def lead(self, tenant: str) -> float:
        """Return how far a known tenant's counter is beyond the lowest of those that wait; some must."""
        first = self._waiting.first
        assert first is not None, "a lead over nobody"
        return self._tenants[tenant].counter - self._tenants[first].counter

    def wait(self, tenant: str, weight: float) -> None:
        """Count one more thing for which the tenant waits. `weight`: above 0; the latest one counts from now on."""
        known = self._tenants.get(tenant)
        if known is None:
            self._num_come += 1
            known = self._tenants[tenant] = _Tenant(self._num_come, weight, self._floor)
        known.weight = weight
        known.num_waiting += 1
        if known.num_waiting > 1:
            return
        first = self._waiting.first
        known.counter = max(known.counter, self._floor if first is None else self._tenants[first].counter)
        self._waiting.add(tenant)

    def stop_waiting(self, tenant: str) -> bool:
        """Count one thing less, which the tenant got or no longer wants; return whether it waits for another."""
        known = self._tenants[tenant]
        known.num_waiting -= 1
        if known.num_waiting:
            return True
        self._waiting.discard(tenant)
        self._last, self._floor = tenant, known.counter
        if len(self._tenants) - len(self._waiting) > MAX_IDLE_TENANTS:
            self._forget()
        return False

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

    def _forget(self) -> None:
        """Forget half of those that do not wait, the ones with the lowest counters."""
        idle = sorted((one.counter, one.number, name) for name, one in self._tenants.items() if not one.num_waiting)
        for _, _, name in idle[: len(idle) // 2]:
            del self._tenants[name]


class Lowest:
    """Tenants, of which the first by some place is wanted: a heap whose entries are brought up to date at its top."""

    def __init__(self, place: Callable[[str], tuple[float, int]]) -> None:
        """`place`: of a tenant, which may rise at any time; `lowered` is told when it falls."""
        self._place = place
        self._heap: list[tuple[tuple[float, int], str]] = []
        self._members: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._members

    @property
    def first(self) -> str | None:
        """The tenant with the lowest place; None: there is none."""
        if len(self._members) == 1:  # nothing to compare
            return next(iter(self._members))
        while self._heap:
            place, tenant = self._heap[0]
            if tenant in self._members:
                now = self._place(tenant)
                if place == now:
                    return tenant
                if place < now:
                    heapq.heapreplace(self._heap, (now, tenant))
                    continue
            heapq.heappop(self._heap)  # it left, or a lower entry of it is there
        return None

    def add(self, tenant: str) -> None:
        """Add a tenant that is not there."""
        self._members[tenant] = None
        self.lowered(tenant)

    def discard(self, tenant: str) -> None:
        """Remove a tenant if it is there."""
        self._members.pop(tenant, None)

    def lowered(self, tenant: str) -> None:
        """Note that the place of a tenant has fallen, if it is a member."""
        if tenant not in self._members:
            return
        heapq.heappush(self._heap, (self._place(tenant), tenant))
        if len(self._heap) > 4 * len(self._members) + 64:
            self._heap = [(self._place(one), one) for one in self._members]
            heapq.heapify(self._heap)

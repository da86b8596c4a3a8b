"""The queue of requests waiting for a prefill worker, in the order of their classes.

Where the policy knows classes, real-time requests that can still hold their first-token objective go first, then late
real-time ones, then best-effort ones; within a class the policy's key decides. While real-time requests wait, best
effort has a share of the tokens that leave the queue, the floor, so that it never starves. Nothing else lets a
best-effort request pass a real-time one. Overdue late requests have such a share beside punctual ones.

Where several tenants wait in a class, the one with the lowest virtual token counter goes (fair_shares.py), and of
its requests the first by class and key. A real-time request that can still hold its objective passes late ones of other
tenants as long as its tenant is at most DEADLINE_LEAD beyond them: deadlines are kept inside a fair share.

The floors, and what a real-time request waits for by them, are in alignedserve/core/class_floor.py.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from alignedserve.core.class_floor import ClassFloor, OverdueFloor, TurnClass
from alignedserve.core.fair_shares import FairShares, cost_of
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from router.policies import OrderKey, PrefillOrder

# By how much a tenant's counter may be beyond the lowest, and its requests on time still go before those that are late.
DEADLINE_LEAD = 1024.0


# By whether requests are real-time, or the order knows no classes.
_CLASSES_OF = {True: (TurnClass.ON_TIME, TurnClass.LATE), False: (TurnClass.BEST_EFFORT,)}


class QueuedPrefill(NamedTuple):
    """One request in the queue, without its identity."""

    num_tokens: int  # to compute
    is_real_time: bool


Turns = dict[tuple[TurnClass, ...], dict[RequestId, tuple[Any, ...]]]
"""Places of requests by the classes that share their turns."""


class QueuedLoad(NamedTuple):
    """The queued requests of a class."""

    num_requests: int
    num_tokens: int  # to compute


class QueueTurn(NamedTuple):
    """A request whose turn it is."""

    request_id: RequestId
    is_by_floor: bool  # best effort before real time


class QueueAhead(NamedTuple):
    """The known requests and tokens that leave the queue before a request."""

    num_requests: int  # the floor aside
    num_tokens: float  # of requests that are queued by now, with what the floor lets go meanwhile
    num_tokens_at_most: float | None  # of best effort, if real-time requests never cease to wait; None: no bound


class _Entry(NamedTuple):
    key: OrderKey
    arrival_s: float
    request_id: RequestId


class _Waiting(NamedTuple):
    queued: QueuedPrefill
    entry: _Entry  # of the request as it was pushed last; others of the same request are stale
    due_s: float
    turn_class: TurnClass
    tenant: str
    cost: float  # of its turn, as far as it is known


class _Line:
    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self.heaps: dict[str, list[_Entry]] = {}
        self.tenants = shares.lowest()  # that may have some here

    def push(self, tenant: str, entry: _Entry) -> None:
        heap = self.heaps.get(tenant)
        if heap is None:
            heap = self.heaps[tenant] = []
            self.tenants.add(tenant)
        heapq.heappush(heap, entry)

    def drop(self, tenant: str) -> None:
        self.heaps.pop(tenant, None)
        self.tenants.discard(tenant)


class PrefillQueue:
    """Priority queue by class, then by policy, arrival and id. Removal is lazy: an entry that is stale is skipped."""

    def __init__(self, order: PrefillOrder, *, floor: float = 0.0) -> None:
        """`floor`: the share of the tokens that best effort has while real time waits, at least 0 and below 1."""
        self.order = order
        self._floor, self._late_floor = ClassFloor(floor), OverdueFloor()
        real_time, best_effort = FairShares(), FairShares()
        self._shares = {True: real_time, False: best_effort}  # by whether real time; of the first, where none is known
        self._lines = {
            TurnClass.ON_TIME: _Line(real_time),
            TurnClass.LATE: _Line(real_time),
            TurnClass.BEST_EFFORT: _Line(best_effort),
        }
        self._waiting: dict[RequestId, _Waiting] = {}
        self.num_tokens = self.num_taken_tokens = 0  # the second: of all that workers ever got
        self._num_real_time = self._num_real_time_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def num_tokens_until_real_time_is_done(self) -> int:
        is_apart = self.order.knows_classes or not self._num_real_time_tokens
        return self._num_real_time_tokens if is_apart else self.num_tokens

    def held(self, *, is_real_time: bool) -> QueuedLoad:
        if is_real_time:
            return QueuedLoad(self._num_real_time, self._num_real_time_tokens)
        return QueuedLoad(len(self) - self._num_real_time, self.num_tokens - self._num_real_time_tokens)

    def push(
        self, request: Request, num_tokens: int, due_s: float = math.inf, *, num_answer_tokens: float = 0.0
    ) -> None:
        """Add a request with `num_tokens` to compute, which must not be queued already.

        `due_s`: when its first token is late; infinite: no objective, or it had its first token. `num_answer_tokens`:
        expected.
        """
        assert request.request_id not in self._waiting, "a request queued twice"
        is_real_time = request.is_real_time
        is_first = is_real_time or not self.order.knows_classes
        waiting = _Waiting(
            QueuedPrefill(num_tokens, is_real_time),
            _Entry(self.order.key(request), request.arrival_s, request.request_id),
            due_s if is_real_time and self.order.knows_classes else math.inf,
            TurnClass.ON_TIME if is_first else TurnClass.BEST_EFFORT,
            request.tenant,
            cost_of(num_tokens, num_answer_tokens),
        )
        self._shares[is_first].wait(request.tenant, request.weight, request.arrival_s)
        self._count(waiting.queued, 1)
        self._put(waiting)

    def num_before(self, request_id: RequestId, now: float) -> int:
        return len(self._before(waiting, now)) if (waiting := self._waiting.get(request_id)) is not None else 0

    def ahead_of(self, request_id: RequestId, now: float, known: Turns | None = None) -> QueueAhead | None:
        """Return what leaves before this request; None: it is not queued. Looks at all requests.

        `known`: turns found at this very moment for other requests; more are added. Best effort waits for requests
        before it, and for real time as long as it waits and the floor does not pass: `(its tokens + tokens before) * (1
        - floor) / floor`.
        """
        if (waiting := self._waiting.get(request_id)) is None:
            return None
        before = self._before(waiting, now, known)
        by_class = dict.fromkeys(TurnClass, 0)
        for other in before:
            by_class[other.turn_class] += other.queued.num_tokens
        real_time = by_class[TurnClass.ON_TIME] + by_class[TurnClass.LATE]
        if waiting.turn_class is not TurnClass.BEST_EFFORT:
            return QueueAhead(len(before), real_time + self._by_floor(real_time), None)
        best_effort = by_class[TurnClass.BEST_EFFORT]
        if not self._floor.owed_share:
            return QueueAhead(len(before), best_effort + real_time, None)
        until_floor = max(best_effort + waiting.queued.num_tokens - self._floor.owed, 0.0) / self._floor.owed_share
        return QueueAhead(len(before), best_effort + min(real_time, until_floor), best_effort + until_floor)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._waiting)

    def turns(self, now: float) -> tuple[QueueTurn, ...]:
        """Return whose turn it is: requests that a floor lets go, and last the request passed by them.

        No later request overtakes them. Each goes if no worker has room for those before: the floor holds up
        nothing.
        """
        turns: list[QueueTurn] = []
        real_time, best_effort = self._first_real_time(now), self._first(TurnClass.BEST_EFFORT)
        if (overdue := self._overdue(now)) is not None and overdue != real_time:
            turns.append(QueueTurn(overdue, False))
        if best_effort is not None and self._floor.is_due(self._waiting[best_effort].queued.num_tokens):
            turns.append(QueueTurn(best_effort, real_time is not None))
        if (last := real_time or best_effort) is not None and (not turns or turns[-1].request_id != last):
            turns.append(QueueTurn(last, False))
        return tuple(turns)

    def is_shared(self, now: float) -> bool:
        return any(shares.is_shared(now) for shares in self._shares.values())

    def is_bounded(self, request_id: RequestId, now: float) -> bool:
        """Return whether a request whose turn it is goes only where less of its class waits
        (prefill_choice.wants_more).

        So it is where tenants share the class, except on time within its tenant's share.
        """
        waiting = self._waiting[request_id]
        shares = self._lines[waiting.turn_class].shares
        if not shares.is_shared(now):
            return False
        return waiting.turn_class is not TurnClass.ON_TIME or not shares.is_behind(waiting.tenant)

    def charge(self, request: Request, cost: float) -> None:
        """Add to the counter of its tenant what a request costs (core/fair_shares.py), or give it back: below 0."""
        is_first = self._is_first(request)
        self._shares[is_first].charge(request.tenant, cost)
        if cost < 0:
            for turn_class in _CLASSES_OF[is_first]:
                self._lines[turn_class].tenants.lowered(request.tenant)

    def release(self, request: Request) -> None:
        self._shares[self._is_first(request)].release(request.tenant)

    def take(self, request_id: RequestId, now: float) -> None:
        waiting = self._waiting[request_id]
        self._lines[waiting.turn_class].shares.hold(waiting.tenant)
        self._remove(request_id)
        self.num_taken_tokens += waiting.queued.num_tokens
        if waiting.turn_class is TurnClass.BEST_EFFORT:
            self._floor.note_own(waiting.queued.num_tokens)
            return
        self._note_passed(self._floor, waiting, TurnClass.BEST_EFFORT)
        if waiting.due_s < math.inf:  # it waits for its first token
            self._late_floor.note_wait(now - waiting.entry.arrival_s)
        if waiting.turn_class is TurnClass.LATE:
            self._late_floor.note_own(waiting.queued.num_tokens)
        else:
            self._note_passed(self._late_floor, waiting, TurnClass.LATE)

    def discard(self, request_id: RequestId) -> None:
        if request_id in self._waiting:
            self._remove(request_id)

    def _remove(self, request_id: RequestId) -> None:
        waiting = self._waiting.pop(request_id)
        self._count(waiting.queued, -1)
        if not self._lines[waiting.turn_class].shares.stop_waiting(waiting.tenant):
            for turn_class in _CLASSES_OF[waiting.turn_class is not TurnClass.BEST_EFFORT]:
                self._lines[turn_class].drop(waiting.tenant)

    def _is_first(self, request: Request) -> bool:
        return request.is_real_time or not self.order.knows_classes

    def _by_floor(self, num_tokens: int) -> float:
        best_effort = self._first(TurnClass.BEST_EFFORT)
        owed = self._floor.owed + self._floor.owed_share * num_tokens
        if best_effort is None or owed < self._waiting[best_effort].queued.num_tokens:
            return 0.0
        return min(owed, float(self.num_tokens - self._num_real_time_tokens))

    def _before(self, waiting: _Waiting, now: float, known: Turns | None = None) -> list[_Waiting]:
        classes = _CLASSES_OF[waiting.turn_class is not TurnClass.BEST_EFFORT]
        shares = self._lines[waiting.turn_class].shares
        if shares.num_waiting == 1:
            rank = (self._class_at(waiting, now), waiting.entry)
            return [entry for entry in self._waiting.values() if (self._class_at(entry, now), entry.entry) < rank]
        beside = [entry for entry in self._waiting.values() if entry.turn_class in classes]
        others = [entry for entry in self._waiting.values() if entry.turn_class < classes[0]]
        turns = None if known is None else known.get(classes)
        if turns is None:
            turns = self._turns_of(beside, shares, now)
            if known is not None:
                known[classes] = turns
        own_turn = turns[waiting.entry.request_id]
        return others + [entry for entry in beside if turns[entry.entry.request_id] < own_turn]

    def _turns_of(self, beside: Iterable[_Waiting], shares: FairShares, now: float) -> dict[RequestId, tuple[Any, ...]]:
        counters: dict[str, tuple[float, int, float]] = {}
        turns: dict[RequestId, tuple[Any, ...]] = {}
        ranked = sorted((self._class_at(waiting, now), waiting.entry, waiting) for waiting in beside)
        for turn_class, entry, waiting in ranked:
            known = counters.get(waiting.tenant)
            counter, order, weight = known or (*shares.counter(waiting.tenant), shares.weight(waiting.tenant))
            counters[waiting.tenant] = counter + waiting.cost / weight, order, weight
            lead = DEADLINE_LEAD if turn_class is TurnClass.ON_TIME else 0.0
            turns[entry.request_id] = (counter - lead, order, turn_class, entry)
        return turns

    def _put(self, waiting: _Waiting) -> None:
        self._waiting[waiting.entry.request_id] = waiting
        self._lines[waiting.turn_class].push(waiting.tenant, waiting.entry)

    def _class_at(self, waiting: _Waiting, now: float) -> TurnClass:
        return TurnClass.LATE if waiting.due_s <= now else waiting.turn_class

    def _first_real_time(self, now: float) -> RequestId | None:
        shares = self._shares[True]
        line = self._lines[TurnClass.ON_TIME]
        while (tenant := self._first_tenant(TurnClass.ON_TIME)) is not None:
            waiting = self._waiting[line.heaps[tenant][0].request_id]
            if waiting.due_s <= now:
                self._put(waiting._replace(turn_class=TurnClass.LATE))
            elif shares.lead(tenant) <= DEADLINE_LEAD:
                return waiting.entry.request_id
            else:
                break
        return self._first(TurnClass.LATE)

    def _overdue(self, now: float) -> RequestId | None:
        if (late := self._first(TurnClass.LATE)) is None:
            return None
        waiting = self._waiting[late]
        since_s, num_tokens = waiting.entry.arrival_s, waiting.queued.num_tokens
        return late if self._late_floor.lets(num_tokens, since_s, waiting.due_s, now) else None

    def _note_passed(self, floor: ClassFloor, taken: _Waiting, turn_class: TurnClass) -> None:
        if (following := self._first(turn_class)) is not None:
            floor.note_earlier(taken.queued.num_tokens, self._waiting[following].queued.num_tokens)

    def _first(self, turn_class: TurnClass) -> RequestId | None:
        tenant = self._first_tenant(turn_class)
        return self._lines[turn_class].heaps[tenant][0].request_id if tenant is not None else None

    def _first_tenant(self, turn_class: TurnClass) -> str | None:
        line = self._lines[turn_class]
        while (tenant := line.tenants.first) is not None:
            heap = line.heaps[tenant]
            while heap:
                waiting = self._waiting.get(heap[0].request_id)
                if waiting is not None and (waiting.turn_class, waiting.entry) == (turn_class, heap[0]):
                    return tenant
                heapq.heappop(heap)
            line.drop(tenant)
        return None

    def _count(self, queued: QueuedPrefill, sign: int) -> None:
        self.num_tokens += sign * queued.num_tokens
        self._num_real_time += sign * queued.is_real_time
        self._num_real_time_tokens += sign * queued.num_tokens * queued.is_real_time

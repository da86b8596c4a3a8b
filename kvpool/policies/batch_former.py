"""The interface of batch formers: an index of pooled requests from which batches are chosen."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

from alignedserve.core.class_floor import ClassFloor, OverdueFloor, TurnClass
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.messages.cluster_view import FormedBatch, LengthTree, tree_of
from kvpool.state import PooledRequest


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Half-open range of context lengths, in tokens."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the size of a batch."""

    max_blocks: int
    max_requests: int
    min_requests: int = 1  # fewer would leave the decode worker idle: search further
    is_for_real_time: bool = False  # where classes are known: best effort by its floor alone
    by_turn: bool = False  # the first by turn, whatever their lengths


@dataclass(frozen=True, slots=True)
class AlignedBatch:
    """Requests to decode together."""

    request_ids: tuple[RequestId, ...]  # shortest context first; those that were chosen by turn, in that order
    lengths: LengthRange  # covers every member
    num_blocks: int  # decode memory needed on admission

    def as_formed(self, batch_id: BatchId, worker: WorkerName) -> FormedBatch:
        lengths, num_requests = self.lengths, len(self.request_ids)
        return FormedBatch(batch_id, worker, lengths.start, lengths.stop, num_requests, self.num_blocks)


class BatchFormer(Protocol):
    """Index of pooled requests. The same history gives the same batches; ties go to the earlier arrival."""

    is_aligned: bool  # its batches are of similar length

    def insert(self, pooled: PooledRequest, now: float) -> None: ...

    def remove(self, request_id: RequestId) -> None: ...

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose a batch within both limits, or None; the caller removes what it grants. Larger requests stay."""

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose requests to join a running batch of these lengths, the oldest first; None also if lengths are
        ignored."""

    def seen(self) -> LengthTree:
        """Return how many requests wait in which range of lengths; an empty tree if the policy ignores lengths."""


def batch_of(chosen: list[PooledRequest], *, by_turn: bool = False) -> AlignedBatch:
    by_length = sorted(chosen, key=lambda pooled: (pooled.context_len, pooled.arrival_s, pooled.request_id))
    return AlignedBatch(
        request_ids=tuple(pooled.request_id for pooled in (chosen if by_turn else by_length)),
        lengths=LengthRange(by_length[0].context_len, by_length[-1].context_len + 1),
        num_blocks=sum(pooled.num_blocks for pooled in by_length),
    )


_Entry = tuple[float, RequestId, int]  # arrival, id, number of the insertion


class FcfsBatchFormer:
    """BatchFormer in order of arrival at the gateway, without overtaking: a request that does not fit ends the batch.

    Example: contexts of 900, 40 and 50 tokens arrive in this order, `max_requests` is 2: the batch is {900, 40}.
    """

    is_aligned = False

    def __init__(self) -> None:
        self._pooled: dict[RequestId, tuple[_Entry, PooledRequest]] = {}
        self._order: list[_Entry] = []  # heap; entries of removed requests are skipped
        self._num_insertions = 0

    def insert(self, pooled: PooledRequest, now: float) -> None:
        assert pooled.request_id not in self._pooled, "a request pooled twice"
        self._num_insertions += 1
        entry = (pooled.arrival_s, pooled.request_id, self._num_insertions)
        self._pooled[pooled.request_id] = (entry, pooled)
        heapq.heappush(self._order, entry)

    def remove(self, request_id: RequestId) -> None:
        del self._pooled[request_id]

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        chosen: list[PooledRequest] = []
        examined: list[_Entry] = []
        num_blocks = 0
        while len(chosen) < limits.max_requests and (pooled := self._pop(examined)) is not None:
            num_blocks += pooled.num_blocks
            if num_blocks > limits.max_blocks:
                break
            chosen.append(pooled)
        for entry in examined:
            heapq.heappush(self._order, entry)
        return batch_of(chosen) if chosen else None

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        return None

    def seen(self) -> LengthTree:
        return LengthTree()

    def _pop(self, examined: list[_Entry]) -> PooledRequest | None:
        while self._order:
            entry = heapq.heappop(self._order)
            current = self._pooled.get(entry[1])
            if current is not None and current[0] == entry:
                examined.append(entry)
                return current[1]
        return None


class TurnBatchFormer:
    """BatchFormer that chooses by turn where its limits say so, and else as the given former does.

    By turn is the order in which the router's fair queue gave prompts out (core/fair_shares.py), up to the first
    request that does not fit; a request larger than the limit is passed over.
    """

    def __init__(self, otherwise: BatchFormer) -> None:
        self._otherwise = otherwise
        self.is_aligned = otherwise.is_aligned
        self._waiting: dict[RequestId, PooledRequest] = {}

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self._waiting[pooled.request_id] = pooled
        self._otherwise.insert(pooled, now)

    def remove(self, request_id: RequestId) -> None:
        del self._waiting[request_id]
        self._otherwise.remove(request_id)

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        return self._first(limits) if limits.by_turn else self._otherwise.form(limits, now)

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """By turn, any lengths may join, and none is passed over."""
        return self._first(limits, passes=False) if limits.by_turn else self._otherwise.join(lengths, limits, now)

    def seen(self) -> LengthTree:
        return self._otherwise.seen()

    def _first(self, limits: BatchLimits, *, passes: bool = True) -> AlignedBatch | None:
        chosen: list[PooledRequest] = []
        blocks_left = limits.max_blocks
        for pooled in sorted(self._waiting.values(), key=attrgetter("turn", "arrival_s", "request_id")):
            if passes and pooled.num_blocks > limits.max_blocks:
                continue
            blocks_left -= pooled.num_blocks
            if blocks_left < 0 or len(chosen) >= limits.max_requests:
                break
            chosen.append(pooled)
        return batch_of(chosen, by_turn=True) if chosen else None


_Choose = Callable[[BatchFormer, BatchLimits], AlignedBatch | None]


class ClassedBatchFormer:
    """BatchFormer that knows classes: a batch is of the first class that waits, and later ones only join its
    lengths.

    Each class (on time, late, best effort) has a former of its own. What is left of a batch's limits goes to later
    classes while nobody of an earlier class is left behind, within the lengths of the batch: it is as aligned as
    without classes. Best effort has a floor while real-time requests wait (core/class_floor.py), as a batch of one;
    so have overdue late requests.
    Example: chats of 40 and 44 tokens wait beside documents of 42, 43 and 900. A batch of five is {40, 44}, the
    chats, then {42, 43}, which join their lengths; the document of 900 waits for a batch of its own.
    """

    def __init__(self, make: Callable[[], BatchFormer], *, floor: float) -> None:
        """`make`: makes the former of one class. `floor`: the share of best effort while real-time requests wait."""
        self._formers = {turn_class: make() for turn_class in TurnClass}
        self.is_aligned = self._formers[TurnClass.BEST_EFFORT].is_aligned
        self._waiting: dict[TurnClass, dict[RequestId, PooledRequest]] = {turn_class: {} for turn_class in TurnClass}
        self._since_s: dict[RequestId, float] = {}  # when real-time ones came
        self._late_floor, self._floor = OverdueFloor(), ClassFloor(floor)
        self._floors = {TurnClass.LATE: self._late_floor, TurnClass.BEST_EFFORT: self._floor}

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self._waiting[pooled.turn_class][pooled.request_id] = pooled
        self._formers[pooled.turn_class].insert(pooled, now)
        if pooled.turn_class is not TurnClass.BEST_EFFORT:
            self._since_s[pooled.request_id] = now

    def remove(self, request_id: RequestId) -> None:
        turn_class = self._class_of(request_id)
        del self._waiting[turn_class][request_id]
        self._formers[turn_class].remove(request_id)
        self._since_s.pop(request_id, None)

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        for by_floor in self._due_by_floor(now) if limits.max_requests > 0 else ():
            lone = self._formers[by_floor].form(replace(limits, max_requests=1, min_requests=1), now)
            if lone is not None:
                return self._noted(lone, now)
        for turn_class in self._classes(limits):
            first = self._formers[turn_class].form(limits, now) if self._waiting[turn_class] else None
            if first is not None:
                return self._noted(self._filled(first, limits, now), now)
        return None

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """A class joins while no request of an earlier one waits, of any lengths, or by its floor."""
        joining = self._join(lengths, limits, self._classes(limits), now, ())
        for by_floor in self._due_by_floor(now) if not joining else ():
            joining = self._members(self._formers[by_floor].join(lengths, replace(limits, max_requests=1), now))
            if joining:
                break
        return self._noted(batch_of(joining, by_turn=limits.by_turn), now) if joining else None

    def seen(self) -> LengthTree:
        tree = LengthTree()
        for former in self._formers.values():
            tree = _merged(tree, former.seen())
        return tree

    def _classes(self, limits: BatchLimits) -> list[TurnClass]:
        return [every for every in TurnClass if every is not TurnClass.BEST_EFFORT or not limits.is_for_real_time]

    def _due_by_floor(self, now: float) -> Iterator[TurnClass]:
        late, best_effort = (next(iter(self._waiting[floor].values()), None) for floor in self._floors)
        on_time = self._waiting[TurnClass.ON_TIME]
        since_s = 0.0 if late is None else self._since_s[late.request_id]
        if late and on_time and self._late_floor.lets(late.context_len, since_s, since_s + late.ttft_s, now):
            yield TurnClass.LATE
        if best_effort and (on_time or late) and self._floor.is_due(best_effort.context_len):
            yield TurnClass.BEST_EFFORT

    def _filled(self, first: AlignedBatch, limits: BatchLimits, now: float) -> AlignedBatch:
        chosen = self._members(first)
        left = replace(
            limits, max_blocks=limits.max_blocks - first.num_blocks, max_requests=limits.max_requests - len(chosen)
        )
        later = [turn_class for turn_class in self._classes(limits) if turn_class > chosen[0].turn_class]
        joining = self._join(first.lengths, left, later, now, chosen)
        return batch_of([*chosen, *joining], by_turn=limits.by_turn) if joining else first

    def _join(
        self,
        lengths: LengthRange,
        limits: BatchLimits,
        classes: Iterable[TurnClass],
        now: float,
        chosen: Iterable[PooledRequest],
    ) -> list[PooledRequest]:
        joining: list[PooledRequest] = []
        taken = {request.request_id for request in chosen}
        for turn_class in classes:
            earlier = (request for other in TurnClass if other < turn_class for request in self._waiting[other])
            if any(request not in taken for request in earlier):
                break
            members = self._members(self._formers[turn_class].join(lengths, limits, now))
            joining += members
            taken.update(member.request_id for member in members)
            limits = replace(
                limits,
                max_blocks=limits.max_blocks - sum(member.num_blocks for member in members),
                max_requests=limits.max_requests - len(members),
            )
        return joining

    def _members(self, batch: AlignedBatch | None) -> list[PooledRequest]:
        if batch is None:
            return []
        return [self._waiting[self._class_of(request_id)][request_id] for request_id in batch.request_ids]

    def _class_of(self, request_id: RequestId) -> TurnClass:
        return next(turn_class for turn_class in TurnClass if request_id in self._waiting[turn_class])

    def _noted(self, batch: AlignedBatch, now: float) -> AlignedBatch:
        members = self._members(batch)
        for member in members:
            if member.turn_class is not TurnClass.BEST_EFFORT:
                self._late_floor.note_wait(now - self._since_s[member.request_id])
        leaving = set(batch.request_ids)
        for turn_class, floor in self._floors.items():
            staying = (request for request in self._waiting[turn_class].values() if request.request_id not in leaving)
            following = next(staying, None)
            for member in members:
                if member.turn_class is turn_class:
                    floor.note_own(member.context_len)
                elif member.turn_class < turn_class and following is not None:
                    floor.note_earlier(member.context_len, following.context_len)
        return batch


def _merged(first: LengthTree, other: LengthTree) -> LengthTree:
    if not first.leaves or not other.leaves:
        return first if first.leaves else other
    leaf_len = max(first.leaf_len, other.leaf_len)
    leaves: dict[int, tuple[int, int]] = {}
    for tree in (first, other):
        for leaf in tree.leaves:
            index = leaf.index * tree.leaf_len // leaf_len
            requests, blocks = leaves.get(index, (0, 0))
            leaves[index] = (requests + leaf.num_requests, blocks + leaf.num_blocks)
    return tree_of(leaves, leaf_len=leaf_len, max_len=max(first.max_len, other.max_len))

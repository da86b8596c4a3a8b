"""Classes before lengths: a batch is of the first class that waits, and another class only joins its lengths.

Each class has a batch former of its own: real-time requests whose first token was in time, those whose first token was
late, and best effort. A batch comes from the former of the first class that has any. What is left of its limits goes to
later classes, while nobody of an earlier one is left behind, and only within the lengths of the batch: so it is as
aligned as without classes. While real-time requests wait, best effort has its floor
(alignedserve/core/class_floor.py), as a batch of a single request; so have late ones that are overdue here.

Example: chats of 40 and 44 tokens wait beside documents of 42, 43 and 900. A batch of five is {40, 44}, the chats, then
{42, 43}, which join their lengths; the document of 900 waits for a batch of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from alignedserve.core.class_floor import ClassFloor, OverdueFloor, TurnClass
from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree, tree_of
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, LengthRange, batch_of
from kvpool.state import PooledRequest

_Choose = Callable[[BatchFormer, BatchLimits], AlignedBatch | None]


class ClassedBatchFormer:
    """BatchFormer that knows classes, and within each chooses as the given formers do."""

    def __init__(self, make: Callable[[], BatchFormer], *, floor: float) -> None:
        """`make`: makes the former of one class. `floor`: the share of best effort while real-time requests wait."""
        self._formers = {one: make() for one in TurnClass}
        self.is_aligned = self._formers[TurnClass.BEST_EFFORT].is_aligned
        self._waiting: dict[TurnClass, dict[RequestId, PooledRequest]] = {one: {} for one in TurnClass}
        self._since_s: dict[RequestId, float] = {}  # when late ones came
        self._late_floor, self._floor = OverdueFloor(), ClassFloor(floor)
        self._floors = {TurnClass.LATE: self._late_floor, TurnClass.BEST_EFFORT: self._floor}

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self._waiting[pooled.turn_class][pooled.request_id] = pooled
        self._formers[pooled.turn_class].insert(pooled, now)
        if pooled.turn_class is TurnClass.LATE:
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
                return self._noted(lone)
        for turn_class in self._classes(limits):
            first = self._formers[turn_class].form(limits, now) if self._waiting[turn_class] else None
            if first is not None:
                return self._noted(self._filled(first, limits, now))
        return None

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """A class joins while no request of an earlier one waits, of any lengths, or by its floor."""
        joining = self._join(lengths, limits, self._classes(limits), now, ())
        for by_floor in self._due_by_floor(now) if not joining else ():
            joining = self._members(self._formers[by_floor].join(lengths, replace(limits, max_requests=1), now))
            if joining:
                break
        return self._noted(batch_of(joining, by_turn=limits.by_turn)) if joining else None

    def seen(self) -> LengthTree:
        tree = LengthTree()
        for former in self._formers.values():
            tree = _merged(tree, former.seen())
        return tree

    # --- inside

    def _classes(self, limits: BatchLimits) -> list[TurnClass]:
        return [one for one in TurnClass if one is not TurnClass.BEST_EFFORT or not limits.is_for_real_time]

    def _due_by_floor(self, now: float) -> Iterator[TurnClass]:
        late, best_effort = (next(iter(self._waiting[floor].values()), None) for floor in self._floors)
        on_time, since_s = self._waiting[TurnClass.ON_TIME], self._since_s
        if late and on_time and self._late_floor.lets(late.context_len, since_s[late.request_id], now):
            yield TurnClass.LATE
        if best_effort and (on_time or late) and self._floor.is_due(best_effort.context_len):
            yield TurnClass.BEST_EFFORT

    def _filled(self, first: AlignedBatch, limits: BatchLimits, now: float) -> AlignedBatch:
        chosen = self._members(first)
        left = replace(
            limits,
            max_blocks=limits.max_blocks - first.num_blocks,
            max_requests=limits.max_requests - len(chosen),
        )
        later = [one for one in self._classes(limits) if one > chosen[0].turn_class]
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
            earlier = (one for other in TurnClass if other < turn_class for one in self._waiting[other])
            if any(one not in taken for one in earlier):
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
        return next(one for one in TurnClass if request_id in self._waiting[one])

    def _noted(self, batch: AlignedBatch) -> AlignedBatch:
        members = self._members(batch)
        leaving = set(batch.request_ids)
        for turn_class, floor in self._floors.items():
            staying = (one for one in self._waiting[turn_class].values() if one.request_id not in leaving)
            following = next(staying, None)
            for member in members:
                if member.turn_class is turn_class:
                    floor.note_own(member.context_len)
                elif member.turn_class < turn_class and following is not None:
                    floor.note_earlier(member.context_len, following.context_len)
        return batch


def _merged(one: LengthTree, other: LengthTree) -> LengthTree:
    if not one.leaves or not other.leaves:
        return one if one.leaves else other
    leaf_len = max(one.leaf_len, other.leaf_len)
    leaves: dict[int, tuple[int, int]] = {}
    for tree in (one, other):
        for leaf in tree.leaves:
            index = leaf.index * tree.leaf_len // leaf_len
            requests, blocks = leaves.get(index, (0, 0))
            leaves[index] = (requests + leaf.num_requests, blocks + leaf.num_blocks)
    return tree_of(leaves, leaf_len=leaf_len, max_len=max(one.max_len, other.max_len))

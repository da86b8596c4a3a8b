"""Classes before lengths: a batch is of the first class that waits, and another class only joins its lengths.

Each class has a batch former of its own: real-time requests whose first token was in time, those whose first token was
late, and best effort. A batch comes from the former of the first class that has any. What is left of its limits goes to
later classes, while nobody of an earlier one is left behind, and only within the lengths of the batch: so it is as
aligned as without classes. While real-time requests wait, best effort has its floor
(alignedserve/core/class_floor.py), as a batch of a single request.

Example: chats of 40 and 44 tokens wait beside documents of 42, 43 and 900. A batch of five is {40, 44}, the chats, then
{42, 43}, which join their lengths; the document of 900 waits for a batch of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from alignedserve.core.class_floor import ClassFloor
from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree, tree_of
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, LengthRange, batch_of
from kvpool.state import BatchClass, PooledRequest

_Choose = Callable[[BatchFormer, BatchLimits], AlignedBatch | None]


class ClassedBatchFormer:
    """BatchFormer that knows classes, and within each chooses as the given formers do."""

    def __init__(self, make: Callable[[], BatchFormer], *, floor: float) -> None:
        """`make`: makes the former of one class. `floor`: the share of best effort while real-time requests wait."""
        self._formers = {one: make() for one in BatchClass}
        self.is_aligned = self._formers[BatchClass.BEST_EFFORT].is_aligned
        self._waiting: dict[BatchClass, dict[RequestId, PooledRequest]] = {one: {} for one in BatchClass}
        self._floor = ClassFloor(floor)

    def insert(self, pooled: PooledRequest, now: float) -> None:
        """See BatchFormer."""
        self._waiting[pooled.batch_class][pooled.request_id] = pooled
        self._formers[pooled.batch_class].insert(pooled, now)

    def remove(self, request_id: RequestId) -> None:
        """See BatchFormer."""
        batch_class = self._class_of(request_id)
        del self._waiting[batch_class][request_id]
        self._formers[batch_class].remove(request_id)

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """See BatchFormer."""
        if self._is_floor_due() and limits.max_requests > 0:
            lone = self._formers[BatchClass.BEST_EFFORT].form(replace(limits, max_requests=1, min_requests=1), now)
            if lone is not None:
                return self._noted(lone)
        for batch_class in self._classes(limits):
            first = self._formers[batch_class].form(limits, now) if self._waiting[batch_class] else None
            if first is not None:
                return self._noted(self._filled(first, limits, now))
        return None

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """See BatchFormer. Best effort joins while no real-time request of any lengths waits, or by its floor."""
        joining = self._join(lengths, limits, self._classes(limits), now, ())
        if not joining and self._is_floor_due():
            lone = self._formers[BatchClass.BEST_EFFORT].join(lengths, replace(limits, max_requests=1), now)
            joining = self._members(lone)
        return self._noted(batch_of(joining, by_turn=limits.by_turn)) if joining else None

    def seen(self) -> LengthTree:
        """See BatchFormer."""
        tree = LengthTree()
        for former in self._formers.values():
            tree = _merged(tree, former.seen())
        return tree

    # --- inside

    def _classes(self, limits: BatchLimits) -> list[BatchClass]:
        return [one for one in BatchClass if one is not BatchClass.BEST_EFFORT or not limits.is_for_real_time]

    def _is_floor_due(self) -> bool:
        """Return whether best effort goes before real-time requests that wait."""
        oldest = next(iter(self._waiting[BatchClass.BEST_EFFORT].values()), None)
        has_real_time = self._waiting[BatchClass.ON_TIME] or self._waiting[BatchClass.LATE]
        return oldest is not None and bool(has_real_time) and self._floor.is_due(oldest.context_len)

    def _filled(self, first: AlignedBatch, limits: BatchLimits, now: float) -> AlignedBatch:
        chosen = self._members(first)
        left = replace(
            limits,
            max_blocks=limits.max_blocks - first.num_blocks,
            max_requests=limits.max_requests - len(chosen),
        )
        later = [one for one in self._classes(limits) if one > chosen[0].batch_class]
        joining = self._join(first.lengths, left, later, now, chosen)
        return batch_of([*chosen, *joining], by_turn=limits.by_turn) if joining else first

    def _join(
        self,
        lengths: LengthRange,
        limits: BatchLimits,
        classes: Iterable[BatchClass],
        now: float,
        chosen: Iterable[PooledRequest],
    ) -> list[PooledRequest]:
        """Choose requests of these classes and lengths, up to the first class before which others are left behind."""
        joining: list[PooledRequest] = []
        taken = {one.request_id for one in chosen}
        for batch_class in classes:
            earlier = (one for other in BatchClass if other < batch_class for one in self._waiting[other])
            if any(one not in taken for one in earlier):
                break
            members = self._members(self._formers[batch_class].join(lengths, limits, now))
            joining += members
            taken.update(one.request_id for one in members)
            limits = replace(
                limits,
                max_blocks=limits.max_blocks - sum(one.num_blocks for one in members),
                max_requests=limits.max_requests - len(members),
            )
        return joining

    def _members(self, batch: AlignedBatch | None) -> list[PooledRequest]:
        if batch is None:
            return []
        return [self._waiting[self._class_of(request_id)][request_id] for request_id in batch.request_ids]

    def _class_of(self, request_id: RequestId) -> BatchClass:
        return next(one for one in BatchClass if request_id in self._waiting[one])

    def _noted(self, batch: AlignedBatch) -> AlignedBatch:
        """Note what leaves with this batch."""
        members = self._members(batch)
        leaving = set(batch.request_ids)
        staying = (one for one in self._waiting[BatchClass.BEST_EFFORT].values() if one.request_id not in leaving)
        following = next(staying, None)
        for one in members:
            if one.batch_class is BatchClass.BEST_EFFORT:
                self._floor.note_best_effort(one.context_len)
            elif following is not None:
                self._floor.note_real_time(one.context_len, following.context_len)
        return batch


def _merged(one: LengthTree, other: LengthTree) -> LengthTree:
    """Return both trees as one, at the coarser of their levels."""
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

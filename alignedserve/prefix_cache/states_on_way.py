"""States that iterations in flight leave for later requests, of a model whose states have blocks of their own."""

from collections.abc import Iterator
from typing import NamedTuple

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import StateKept
from alignedserve.prefix_cache.cached_blocks import CachingAllocator
from alignedserve.prefix_cache.contexts import CachedContext, PrefixCache
from alignedserve.prefix_cache.kept_states import KeptEdge


class Passed(NamedTuple):
    """Tokens of a context that an iteration computes."""

    first: int
    last: int  # behind them
    is_answer: bool


class StatesOnWay:
    """The blocks that are taken for such states: in the cache once the iteration has ended, or free again."""

    def __init__(self, allocator: CachingAllocator, prefixes: PrefixCache | None) -> None:
        self._allocator = allocator
        self._prefixes = prefixes
        self._budget = None if prefixes is None else prefixes.states
        self._coming: dict[RequestId, list[KeptEdge]] = {}

    @property
    def are_kept(self) -> bool:
        return self._budget is not None and self._budget.max_states > 0

    def has_coming(self, request_id: RequestId) -> bool:
        """Return whether an iteration in flight leaves states of this request."""
        return request_id in self._coming

    def begin(
        self, request_id: RequestId, context: CachedContext, passed: Passed, *, num_kept_free: int
    ) -> Iterator[StateKept]:
        """Take blocks for the states at edges that a request passes, and yield them; none where fewer than
        `num_kept_free` would be left."""
        assert self._prefixes is not None, "states without a cache"
        edges = self._prefixes.edges_in(context, passed.first, passed.last, is_answer=passed.is_answer)
        for num_tokens, is_latest in edges:
            state_ids = self._take(context, num_kept_free, is_latest=is_latest)
            if state_ids is not None:
                self._coming.setdefault(request_id, []).append(KeptEdge(num_tokens, state_ids, is_latest))
                yield StateKept(request_id, num_tokens, state_ids)

    def settle(self, request_id: RequestId, context: CachedContext | None, *, is_whole: bool) -> None:
        """Keep what an iteration has left, once its blocks are cached. Unless `is_whole` it is of no use."""
        for kept in self._coming.pop(request_id, ()):
            assert self._prefixes is not None, "states without a cache"
            if not (is_whole and context is not None and self._prefixes.keep_state(context, kept)):
                self._allocator.free(kept.state_ids)

    def _take(self, context: CachedContext, num_kept_free: int, *, is_latest: bool) -> tuple[BlockId, ...] | None:
        assert self._prefixes is not None, "states without a cache"
        assert self._budget is not None, "states without a budget"
        num_coming = sum(map(len, self._coming.values()))
        self._allocator.free(self._prefixes.room_for_state(context, num_coming, is_latest=is_latest))
        if self._allocator.num_free < self._budget.num_blocks + num_kept_free:
            return None
        return self._allocator.allocate(self._budget.num_blocks)

"""Contexts that use the prefix cache of a worker: what each may take from it while it waits, holds, and leaves there.

The life of a context:
1. It waits: the longest run of cached blocks with which it begins is kept up to date as blocks come and go. It holds no
   block and may lose some: running requests go first.
2. It enters: it becomes a user of the blocks of its run, and computes the rest in blocks of its own. At least one token
   is left to compute: if that lies in a block of the run, it gets a copy of this block, to fill from that token on.
3. A block that it has filled is stored, at the end of the iteration, for others to use. If another context was faster,
   both use the stored block, and the second is freed.
4. It leaves, or loses its memory to another: what it held stays cached until the memory is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import StateKept
from alignedserve.prefix_cache.block_hashes import BlockHash, BlockHasher, NamedBlock, block_hash, packed_tokens
from alignedserve.prefix_cache.cached_blocks import (
    BlockObserver,
    CachedBlock,
    CachedBlocks,
    CachingAllocator,
    KeptEdge,
    StateBudget,
)

TokensBetween = Callable[[int, int], tuple[int, ...]]  # of a context, from the first to before the second


@dataclass(slots=True, eq=False)
class CachedContext:
    """The blocks of one context that concern the cache."""

    request_id: RequestId
    root: BlockHash
    names: list[NamedBlock]  # of its full blocks, as many as are named yet
    run: list[CachedBlock] = field(default_factory=list)  # that it begins with, while it waits
    max_run: int = 0  # blocks that its run may have at most
    max_hit_tokens: int = 0  # of them; less than all of the last one, if that is to be copied
    held: list[CachedBlock] = field(default_factory=list)  # its first blocks, as far as it uses cached ones
    is_waiting: bool = False
    is_closed: bool = False  # it stores nothing more
    edges: tuple[int, ...] = ()  # in tokens, where its states are to be kept (PrefixCache.edges_in)
    latest: CachedBlock | None = None  # the last one that its answer has passed

    @property
    def wanted(self) -> BlockHash | None:
        at = len(self.run)
        return self.names[at].block_hash if at < self.max_run else None


class EnteredRun(NamedTuple):
    """A context's part in the cache as it enters."""

    held: list[CachedBlock]  # used now
    copied: CachedBlock | None  # its first tokens begin the next block
    num_tokens: int  # in all blocks
    state: CachedBlock | None = None  # with the states to begin with behind it; None: no states


class AdoptedBlock(NamedTuple):
    """A block of a context in whose place an equal one is used that was cached already."""

    place: int  # in the context
    block_id: BlockId  # the cached one
    freed: BlockId  # its own


def num_behind_state(run: Sequence[CachedBlock]) -> int:
    return next((index + 1 for index in reversed(range(len(run))) if run[index].state_ids), 0)


class WaitingRuns(BlockObserver):
    """The runs of waiting contexts, kept up to date block by block; a run that does not change costs nothing."""

    def __init__(self, cached: CachedBlocks) -> None:
        self._cached = cached
        self._by_wanted: dict[BlockHash, dict[CachedContext, None]] = {}
        self._by_last: dict[BlockHash, dict[CachedContext, None]] = {}
        self._all: dict[CachedContext, None] = {}
        self._changed: dict[CachedContext, None] = {}

    def add(self, context: CachedContext) -> None:
        context.is_waiting = True
        self._all[context] = None
        self._prolong(context)
        self._enlist(context)
        self._changed[context] = None

    def remove(self, context: CachedContext) -> list[CachedBlock]:
        self._delist(context)
        self._changed.pop(context, None)
        del self._all[context]
        run, context.run, context.is_waiting = context.run, [], False
        return run

    def take_changed(self) -> list[CachedContext]:
        if not self._changed:
            return []
        changed, self._changed = list(self._changed), {}
        return changed

    @override
    def stored(self, block: CachedBlock) -> None:
        for context in list(self._by_wanted.get(block.block_hash, ())):
            self._delist(context)
            if self._prolong(context):
                self._changed[context] = None
            self._enlist(context)

    @override
    def removed(self, block: CachedBlock) -> None:
        for context in list(self._by_last.get(block.block_hash, ())):
            self._delist(context)
            context.run.pop()
            self._enlist(context)
            self._changed[context] = None

    def state_changed(self, block: CachedBlock) -> None:
        depth = block.depth
        self._changed |= {
            context: None for context in self._all if depth < len(context.run) and context.run[depth] is block
        }

    def _prolong(self, context: CachedContext) -> bool:
        run, names, num_before = context.run, context.names, len(context.run)
        while len(run) < context.max_run:
            name = names[len(run)]
            block = self._cached.match(run[-1] if run else None, name)
            if block is None:
                break
            run.append(block)
        return len(run) > num_before

    def _enlist(self, context: CachedContext) -> None:
        if (wanted := context.wanted) is not None:
            self._by_wanted.setdefault(wanted, {})[context] = None
        if context.run:
            self._by_last.setdefault(context.run[-1].block_hash, {})[context] = None

    def _delist(self, context: CachedContext) -> None:
        if (wanted := context.wanted) is not None:
            _discard(self._by_wanted, wanted, context)
        if context.run:
            _discard(self._by_last, context.run[-1].block_hash, context)


def _discard(
    contexts: dict[BlockHash, dict[CachedContext, None]], block_hash: BlockHash, context: CachedContext
) -> None:
    entries = contexts[block_hash]
    del entries[context]
    if not entries:
        del contexts[block_hash]


class PrefixCache:
    """The cached blocks of a worker's memory, and the contexts of its requests."""

    def __init__(self, block_size: int, *, takes_whole: bool = False, states: StateBudget | None = None) -> None:
        """`takes_whole`: a part of a block is of no use, as a state stands behind all of its tokens.
        `states`: contexts go on where states are kept, in blocks of their own; None: they have none.
        """
        self.block_size, self._takes_whole = block_size, takes_whole
        self.states = states
        self.blocks = CachedBlocks(block_size)
        self._hasher = BlockHasher(block_size)
        self._waiting = WaitingRuns(self.blocks)
        self.blocks.observers.append(self._waiting)
        self.blocks.states.observers.append(self._waiting.state_changed)
        self.num_query_tokens = 0  # of contexts that entered
        self.num_hit_tokens = 0  # of those, taken from the cache

    def add(self, request_id: RequestId, root: BlockHash, token_ids: tuple[int, ...]) -> CachedContext:
        return CachedContext(request_id, root, self.names_of(root, token_ids))

    def names_of(self, root: BlockHash, token_ids: tuple[int, ...]) -> list[NamedBlock]:
        return list(self._hasher.named(root, token_ids))

    def wait(self, context: CachedContext, max_hit_tokens: int) -> None:
        assert not context.held, "a context that waits and holds blocks"
        assert not context.is_waiting, "a context that waits already"
        part = max_hit_tokens % self.block_size if self._takes_whole else 0
        context.max_hit_tokens = max(max_hit_tokens - part, 0)
        context.max_run = min(blocks_for(context.max_hit_tokens, self.block_size), len(context.names))
        self._waiting.add(context)

    def num_foreseen(self, context: CachedContext) -> int:
        if self.states is not None:
            return num_behind_state(context.run) * self.block_size
        return min(len(context.run) * self.block_size, context.max_hit_tokens)

    def take_changed(self) -> list[CachedContext]:
        return self._waiting.take_changed()

    def enter(self, context: CachedContext, context_len: int) -> EnteredRun:
        num_tokens = self.num_foreseen(context)
        run, num_whole = self._waiting.remove(context), num_tokens // self.block_size
        context.held += run[:num_whole]
        if self.states is not None:
            return self._enter_behind_state(context, run, context_len)
        self.blocks.acquire(context.held)
        self.num_query_tokens += context_len
        self.num_hit_tokens += num_tokens
        return EnteredRun(context.held, run[num_whole] if len(run) > num_whole else None, num_tokens)

    def _enter_behind_state(self, context: CachedContext, run: list[CachedBlock], context_len: int) -> EnteredRun:
        state, size = (context.held[-1] if context.held else None), self.block_size
        self.blocks.acquire(context.held)
        if state is not None:
            self.blocks.states.use(state)
        edges = {(context_len - 1) // size * size, len(run) * size}
        context.edges = tuple(sorted(edge for edge in edges if edge > len(context.held) * size))
        context.latest = None
        self.num_query_tokens += context_len
        self.num_hit_tokens += len(context.held) * size
        return EnteredRun(context.held, None, len(context.held) * size, state)

    def edges_in(self, context: CachedContext, first: int, last: int, *, is_answer: bool) -> list[tuple[int, bool]]:
        """Return the edges behind `first` up to `last` tokens where states are to be kept, and whether each replaces
        the last."""
        if context.is_closed:
            return []
        edges = [(edge, False) for edge in context.edges if first < edge <= last and not self._has_state(context, edge)]
        latest = last // self.block_size * self.block_size
        return [*edges, (latest, True)] if is_answer and latest > first else edges

    def _has_state(self, context: CachedContext, edge: int) -> bool:
        at = edge // self.block_size - 1
        block = self.blocks.get(context.names[at].block_hash) if at < len(context.names) else None
        return block is not None and bool(block.state_ids)

    def room_for_state(self, context: CachedContext, num_coming: int, *, is_latest: bool) -> list[BlockId]:
        """Forget states whose place one more takes; return their free blocks. `num_coming`: other states to be kept
        soon."""
        assert self.states is not None, "states that are not kept"
        freed: list[BlockId] = []
        if is_latest and context.latest is not None:
            freed += self.blocks.drop_state(context.latest)
            context.latest = None
        while self.blocks.states and len(self.blocks.states) + num_coming >= self.states.max_states:
            freed += self.blocks.drop_state(self.blocks.states.oldest())
        return freed

    def keep_state(self, context: CachedContext, edge: KeptEdge) -> bool:
        at = edge.num_tokens // self.block_size - 1
        block = context.held[at] if at < len(context.held) else None
        if block is None or block.state_ids:
            return False
        self.blocks.keep_state(block, edge.state_ids)
        if edge.is_latest:
            context.latest = block
        return True

    def keep_loaded_state(self, block: CachedBlock, state_ids: tuple[BlockId, ...]) -> list[BlockId] | None:
        """Keep states from elsewhere behind a cached block; return the blocks of states that leave for them; None: no
        use."""
        assert self.states is not None, "states that are not kept"
        if block.state_ids or not self.states.max_states:
            return None
        freed: list[BlockId] = []
        while len(self.blocks.states) >= self.states.max_states:
            freed += self.blocks.drop_state(self.blocks.states.oldest())
        self.blocks.keep_state(block, state_ids)
        return freed

    def leave(self, context: CachedContext, num_kept: int = 0) -> None:
        if context.is_waiting:
            self._waiting.remove(context)
        if len(context.held) > num_kept:
            self.blocks.release(context.held[num_kept:])
            del context.held[num_kept:]

    def store(
        self,
        context: CachedContext,
        num_full: int,
        block_ids: list[BlockId],
        tokens_between: TokensBetween,
        num_before: int = 0,
    ) -> Iterator[AdoptedBlock]:
        """Store the blocks that a context has computed since; yield blocks that equal cached ones replace.

        `num_full`: full and computed blocks. `block_ids`: of the whole context, behind `num_before` other blocks;
        adopted ids are written there.
        """
        held, names = context.held, context.names
        if context.is_closed:
            return
        if len(names) < num_full:
            self._name(context, num_full, tokens_between)
        for index in range(len(held), num_full):
            block_id = block_ids[num_before + index]
            block = self.blocks.store(held[-1] if held else None, *names[index], block_id)
            if block is None:  # another block has its hash
                context.is_closed = True
                return
            if block.block_id != block_id:
                self.blocks.acquire((block,))
                block_ids[num_before + index] = block.block_id
                yield AdoptedBlock(index, block.block_id, block_id)
            held.append(block)

    def _name(self, context: CachedContext, num_full: int, tokens_between: TokensBetween) -> None:
        names, size = context.names, self.block_size
        parent = names[-1].block_hash if names else context.root
        for start in range(len(names) * size, num_full * size, size):  # most often one
            packed = packed_tokens(tokens_between(start, start + size))
            parent = block_hash(parent, packed)
            names.append(NamedBlock(parent, packed))


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
        return request_id in self._coming

    def begin(
        self, request_id: RequestId, context: CachedContext, passed: Passed, *, num_kept_free: int
    ) -> Iterator[StateKept]:
        """Take and yield blocks for the states at passed edges; none where fewer than `num_kept_free` would be left."""
        assert self._prefixes is not None, "states without a cache"
        edges = self._prefixes.edges_in(context, passed.first, passed.last, is_answer=passed.is_answer)
        for num_tokens, is_latest in edges:
            state_ids = self._take(context, num_kept_free, is_latest=is_latest)
            if state_ids is not None:
                self._coming.setdefault(request_id, []).append(KeptEdge(num_tokens, state_ids, is_latest))
                yield StateKept(request_id, num_tokens, state_ids)

    def settle(self, request_id: RequestId, context: CachedContext | None, *, is_whole: bool) -> None:
        for edge in self._coming.pop(request_id, ()):
            assert self._prefixes is not None, "states without a cache"
            if not (is_whole and context is not None and self._prefixes.keep_state(context, edge)):
                self._allocator.free(edge.state_ids)

    def _take(self, context: CachedContext, num_kept_free: int, *, is_latest: bool) -> tuple[BlockId, ...] | None:
        assert self._prefixes is not None, "states without a cache"
        assert self._budget is not None, "states without a budget"
        num_coming = sum(map(len, self._coming.values()))
        self._allocator.free(self._prefixes.room_for_state(context, num_coming, is_latest=is_latest))
        if self._allocator.num_free < self._budget.num_blocks + num_kept_free:
            return None
        return self._allocator.allocate(self._budget.num_blocks)

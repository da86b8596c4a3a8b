"""Cached blocks of one memory: a forest of full blocks, each known by its hash, with its tokens to verify it.

A block is used by the contexts that hold it and all blocks before it, so that a block without users has none among its
descendants, and every block without users can leave, the last ones of their contexts first. Whose memory it is decides
what a block's id means: a block of a worker's storage, or of an arena.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId
from alignedserve.messages.prefixes import PrefixBlocksChanged, names_told
from alignedserve.prefix_cache.block_hashes import BlockHash, NamedBlock, block_hash


@dataclass(frozen=True, slots=True)
class StateBudget:
    """What states may take of a worker's blocks."""

    num_blocks: int  # of one
    max_states: int  # that are kept


def budget_of(config: PrefixCacheConfig, num_blocks: int, state_blocks: int) -> StateBudget | None:
    """Return what states may take of so many blocks; None: they have no blocks of their own."""
    return StateBudget(state_blocks, int(config.state_share * num_blocks) // state_blocks) if state_blocks else None


class KeptStates:
    """The blocks behind which recurrent states are kept for later requests, by use; the longest unused state goes
    first.

    A large state takes as much room as hundreds of tokens. A context keeps states 1. at the last edge before its
    last token on entry: a next turn has its prompt before it; 2. at the last edge that others shared: contexts part
    there; 3. at the last edge that its answer has passed.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[CachedBlock, None] = OrderedDict()  # the latest used last
        self.observers: list[Callable[[CachedBlock], None]] = []  # called with a block whose state came or went
        self.num_used = 0  # contexts that began with one, since it was made

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: "CachedBlock") -> None:
        self._blocks[block] = None
        self._tell(block)

    def remove(self, block: "CachedBlock") -> None:
        del self._blocks[block]
        self._tell(block)

    def use(self, block: "CachedBlock") -> None:
        self._blocks.move_to_end(block)
        self.num_used += 1

    def oldest(self) -> "CachedBlock":
        return next(iter(self._blocks))

    def _tell(self, block: "CachedBlock") -> None:
        for observer in self.observers:
            observer(block)


class KeptEdge(NamedTuple):
    """An edge of blocks, in tokens of a context, where an iteration leaves its states for later contexts."""

    num_tokens: int
    state_ids: tuple[BlockId, ...]
    is_latest: bool  # in place of the one before


def state_names(edge: BlockHash, num_blocks: int) -> list[NamedBlock]:
    """Return a pool's names of the states behind this block, which it keeps like following blocks.

    No block of tokens has such a name: in place of tokens it has one byte.
    """
    names = list[NamedBlock]()
    for number in range(num_blocks):
        packed = bytes([number % 256])
        names.append(NamedBlock(block_hash(names[-1].block_hash if names else edge, packed), packed))
    return names


MAX_COUNTED_USES = 8  # more uses do not make a block more valuable
REMEMBERED_SHARE = 4  # blocks that have left and are remembered, by those in the cache


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block of tokens whose cache is in memory."""

    block_hash: BlockHash
    parent: "CachedBlock | None"  # the block before it; None: it is a context's first
    packed_tokens: bytes
    block_id: BlockId
    depth: int  # blocks before it
    num_users: int = 0  # contexts that hold it now
    num_uses: int = 0  # contexts that ever held it, and before it was evicted
    num_children: int = 0  # cached blocks that follow it
    value: float = 0.0  # since its last user left; while it has none
    ticket: int = 0  # of that moment; 0: it has users
    state_ids: tuple[BlockId, ...] = ()  # where the states behind it are kept; none: nowhere


class BlockChanges(NamedTuple):
    """Blocks that have come and gone; none is in both."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class BlockObserver(Protocol):
    """A follower of the blocks of one memory as they come and go."""

    def stored(self, block: CachedBlock) -> None:
        """Note a block that has come."""

    def removed(self, block: CachedBlock) -> None: ...


class CachedBlocks:
    """All cached blocks of one memory. It allocates nothing: ids of blocks come in, and evicted ids go out.

    A block without users has the value of the block evicted last plus its uses: frequency with dynamic aging
    (GreedyDual: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching", 1998). The
    first term ages values; equal uses go by the latest use. Blocks have one size, so bytes cancel out, and their
    place counts little: attention over 32 768 tokens costs an 8B model as much as its products. Counts outlive
    blocks for a while. Figures: docs/prefix-cache.md.
    """

    def __init__(self, block_size: int, *, remembered_share: int = REMEMBERED_SHARE) -> None:
        """`remembered_share`: evicted blocks whose uses are remembered, by the blocks in the cache."""
        self._block_size = block_size
        self._remembered_share = remembered_share
        self._blocks: dict[BlockHash, CachedBlock] = {}
        self._leaves: list[tuple[float, int, CachedBlock]] = []  # a heap; an entry with an old ticket is void
        self._num_tickets = 0
        self._age = 0.0  # the value of the block evicted last
        self._former_uses: OrderedDict[BlockHash, int] = OrderedDict()  # of blocks evicted, the latest of them last
        self._changes: dict[BlockHash, bool] = {}  # True: stored
        self.observers: list[BlockObserver] = []
        self.states = KeptStates()  # behind some of the blocks
        self.num_unused = 0  # blocks without users, and blocks of states, which `evict` frees
        self.num_evicted = 0  # since it was made

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._blocks.values())

    def get(self, block_hash: BlockHash) -> CachedBlock | None:
        return self._blocks.get(block_hash)

    def run_of(self, names: Iterable[NamedBlock]) -> list[CachedBlock]:
        run: list[CachedBlock] = []
        for name in names:
            block = self.match(run[-1] if run else None, name)
            if block is None:
                break
            run.append(block)
        return run

    def match(self, parent: CachedBlock | None, name: NamedBlock) -> CachedBlock | None:
        block = self._blocks.get(name.block_hash)
        is_same = block is not None and block.parent is parent and block.packed_tokens == name.packed_tokens
        return block if is_same else None

    def store(
        self, parent: CachedBlock | None, block_hash: BlockHash, packed_tokens: bytes, block_id: BlockId
    ) -> CachedBlock | None:
        """Add a block with one user, who holds all blocks before it; return the new or an equal block.

        None: another block has this hash, and keeps it.
        """
        assert parent is None or parent.num_users, "a block after one that may leave"
        if block_hash in self._blocks:
            return self.match(parent, NamedBlock(block_hash, packed_tokens))
        depth = 0 if parent is None else parent.depth + 1
        num_uses = 1 + self._former_uses.pop(block_hash, 0)
        block = CachedBlock(block_hash, parent, packed_tokens, block_id, depth, num_users=1, num_uses=num_uses)
        if parent is not None:
            parent.num_children += 1
        self._blocks[block_hash] = block
        self._note(block_hash, is_stored=True)
        for observer in self.observers:
            observer.stored(block)
        return block

    def acquire(self, blocks: Iterable[CachedBlock], *, is_use: bool = True) -> None:
        """Add a user to each of these first blocks of a context. Without `is_use` they are only kept."""
        for block in blocks:
            assert block.block_hash in self._blocks, "a block that has left is acquired"
            self.num_unused -= not block.num_users
            block.num_users += 1
            block.num_uses += is_use
            block.ticket = 0

    def release(self, blocks: Sequence[CachedBlock]) -> None:
        """Remove one user from each of these blocks, in the order of their context; they stay until evicted."""
        for block in reversed(blocks):
            assert block.num_users > 0, "a block released more often than acquired"
            block.num_users -= 1
            if not block.num_users:
                self.num_unused += 1
                self._num_tickets += 1
                block.ticket = self._num_tickets
                block.value = self._age + min(block.num_uses, MAX_COUNTED_USES)
                if not block.num_children:
                    self._offer(block)

    def evict(self, count: int) -> list[BlockId]:
        """Remove this many blocks without users, the least valuable leaf first; return the ids, now free.

        A leaf leaves with its state; once no leaf is left, the longest unused states go: there may be more ids.
        """
        assert count <= self.num_unused, "more blocks evicted than have no users"
        freed: list[BlockId] = []
        while len(freed) < count:
            if not self._leaves:
                freed += self.drop_state(self.states.oldest())
                continue
            value, ticket, block = heapq.heappop(self._leaves)
            if ticket != block.ticket:
                continue
            self._age = max(self._age, value)
            freed += self.drop_state(block)
            self._remove(block)
            freed.append(block.block_id)
            self.num_evicted += 1
        return freed

    def drop(self, block: CachedBlock) -> list[BlockId]:
        assert not block.num_users, "a block that is used is dropped"
        dropped = {block: None}
        for descendant in sorted(self._blocks.values(), key=lambda descendant: descendant.depth):
            if descendant.parent in dropped:
                dropped[descendant] = None
        freed: list[BlockId] = []
        for descendant in reversed(dropped):
            freed += [*self.drop_state(descendant), descendant.block_id]
            self._remove(descendant)
        return freed

    def keep_state(self, block: CachedBlock, state_ids: tuple[BlockId, ...]) -> None:
        assert not block.state_ids, "a state that is kept twice"
        assert self._blocks.get(block.block_hash) is block, "the state of a block that has left"
        block.state_ids = state_ids
        self.num_unused += len(state_ids)
        self.states.add(block)

    def drop_state(self, block: CachedBlock) -> tuple[BlockId, ...]:
        state_ids, block.state_ids = block.state_ids, ()
        if state_ids:
            self.num_unused -= len(state_ids)
            self.states.remove(block)
        return state_ids

    def take_changes(self) -> BlockChanges:
        if not self._changes:
            return BlockChanges((), ())
        changes, self._changes = self._changes, {}
        stored = tuple([block_hash for block_hash, is_stored in changes.items() if is_stored])
        return BlockChanges(stored, tuple([block_hash for block_hash, is_stored in changes.items() if not is_stored]))

    def told_changes(self) -> PrefixBlocksChanged | None:
        """Return, for routers, the changes since the last call, of about one block in four (`names_told`); None:
        none."""
        stored, removed = (names_told(hashes) for hashes in self.take_changes())
        return PrefixBlocksChanged(stored, removed) if stored or removed else None

    def told_all(self) -> PrefixBlocksChanged | None:
        """Return, for a router that is new, all blocks; None: there are none. `told_changes` goes on from there."""
        self.take_changes()
        names = names_told(block.block_hash for block in self)
        return PrefixBlocksChanged(names, is_complete=True) if names else None

    def _remove(self, block: CachedBlock) -> None:
        block.ticket = 0
        self.num_unused -= 1
        del self._blocks[block.block_hash]
        self._former_uses[block.block_hash] = block.num_uses
        if len(self._former_uses) > self._remembered_share * len(self._blocks):
            self._former_uses.popitem(last=False)
        self._note(block.block_hash, is_stored=False)
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_users and not parent.num_children:
                self._offer(parent)
        for observer in self.observers:
            observer.removed(block)

    def _offer(self, block: CachedBlock) -> None:
        heapq.heappush(self._leaves, (block.value, block.ticket, block))
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            self._leaves = [entry for entry in self._leaves if entry[1] == entry[2].ticket]
            heapq.heapify(self._leaves)

    def _note(self, block_hash: BlockHash, *, is_stored: bool) -> None:
        if block_hash in self._changes:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = is_stored


def context_of(block: CachedBlock | None) -> list[CachedBlock]:
    """Return the blocks of its context up to this block; None: no blocks."""
    run: list[CachedBlock] = []
    while block is not None:
        run.append(block)
        block = block.parent
    return run[::-1]


class CachingAllocator:
    """A block allocator to which cached blocks without users are free: it evicts them when others are lacking."""

    __slots__ = ("_allocator", "_cached")

    def __init__(self, num_blocks: int, cached: CachedBlocks | None = None) -> None:
        """`cached`: empty, of the same memory; None: nothing is cached."""
        self._allocator = BlockAllocator(num_blocks)
        self._cached = cached

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        unused = 0 if self._cached is None else self._cached.num_unused
        return self._allocator.num_free + unused

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """Allocate `count` blocks; return None, allocating and evicting none, if fewer are free."""
        missing = count - self._allocator.num_free
        if missing > 0:
            if self._cached is None or missing > self._cached.num_unused:
                return None
            self._allocator.free(self._cached.evict(missing))
        return self._allocator.allocate(count)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        self._allocator.free(block_ids)

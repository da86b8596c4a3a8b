"""Prefix blocks that a pool keeps beside the caches of requests, until these need the memory.

The life of a block here:
1. A worker offers it (StorePrefixBlocks). If it is new, and a block is free or one of less value can leave, it gets a
   place to write to, under a lease of its own: PrefixBlocksReserved.
2. PrefixBlocksWritten brings its checksum: the pool keeps the block and stamps it as readable.
3. A worker asks for the blocks that follow what it has (FindPrefix) and gets the longest run that is kept, with tokens
   and checksums. Blocks that are lent stay until PrefixReleased, or until the worker is lost.
States that have blocks of their own are kept like blocks that follow the one behind which they stand; a run is lent up
to the last block that has some, with them.
4. Without readers it leaves when its place is needed: at once for a request, else for a block of more value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId, LeaseId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.events import Send
from alignedserve.messages.prefixes import (
    HASH_BYTES,
    FindPrefix,
    PrefixBlock,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixPart,
    PrefixReleased,
    ReservedPart,
    StorePrefixBlocks,
)
from alignedserve.prefix_cache.cached_blocks import CachedBlock, CachedBlocks, context_of, state_names
from kvpool.state import NO_GENERATION, SetBlockGeneration

PrefixMessage = StorePrefixBlocks | PrefixBlocksWritten | FindPrefix | PrefixReleased
StoreCommand = Send | SetBlockGeneration


@dataclass(slots=True, eq=False)
class _Writing:
    worker: str
    before: list[CachedBlock]  # the blocks of the context before them, held meanwhile
    blocks: tuple[PrefixBlock, ...]
    block_ids: tuple[BlockId, ...]
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Lent:
    worker: str
    run: list[CachedBlock]  # from the first block of the context
    first: int  # the first that it reads


class PrefixStore:
    """The prefix blocks of one arena. It touches no byte. What can be read is all stamped with one generation."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        take_lease: Callable[[], LeaseId],
        lease_s: float,
        state_blocks: int = 0,
    ) -> None:
        """`allocator`: of the arena, shared with the leases of requests, as are the numbers of `take_lease`.
        `state_blocks`: that states behind a block take, which are kept as blocks that follow it."""
        self.cached = CachedBlocks(block_size)
        self._allocator = allocator
        self._block_size, self._state_blocks = block_size, state_blocks
        self._take_lease = take_lease
        self._lease_s = lease_s
        self._generation = NO_GENERATION  # of what can be read, once there is any
        self._checksums: dict[BlockId, int] = {}
        self._writing: dict[LeaseId, _Writing] = {}
        self._written_by: dict[bytes, LeaseId] = {}  # hashes of blocks that are being written
        self._lent: dict[LeaseId, _Lent] = {}
        self._damaged: set[BlockId] = set()  # membership only: never lent again; they leave with their last user

    @property
    def num_blocks(self) -> int:
        return len(self.cached) + len(self._written_by)

    @property
    def num_unused(self) -> int:
        return self.cached.num_unused

    def make_room(self, num_blocks: int) -> list[StoreCommand]:
        count = min(num_blocks - self._allocator.num_free, self.cached.num_unused)
        if count < 1:
            return []
        return self._free_kept(self.cached.evict(count))

    def on_message(self, peer: str, message: PrefixMessage, now: float, *, may_write: bool) -> list[StoreCommand]:
        match message:
            case StorePrefixBlocks(parts):
                return self._store(peer, parts if may_write else (), now, len(parts))
            case PrefixBlocksWritten(lease_id, checksums):
                return self._written(peer, lease_id, checksums)
            case FindPrefix():
                return [Send(peer, self._find(peer, message))]
            case PrefixReleased(lease_id, is_damaged):
                lent = self._lent.get(lease_id)
                if lent is not None and lent.worker == peer:
                    return self._take_back(lease_id, is_damaged=is_damaged)
        return []

    def lose(self, peer: str) -> list[StoreCommand]:
        lent = [lease_id for lease_id, lent in self._lent.items() if lent.worker == peer]
        commands = [command for lease_id in lent for command in self._take_back(lease_id)]
        written = [lease_id for lease_id, writing in self._writing.items() if writing.worker == peer]
        return commands + self._end_writing(written)

    def end_expired(self, now: float) -> list[StoreCommand]:
        return self._end_writing([lease_id for lease_id, writing in self._writing.items() if writing.deadline_s < now])

    # --- blocks to write

    def _store(self, peer: str, parts: tuple[PrefixPart, ...], now: float, num_parts: int) -> list[StoreCommand]:
        commands: list[StoreCommand] = []
        answers = [ReservedPart(0)] * (num_parts - len(parts))
        for part in parts:
            answer, more = self._reserve(peer, part, now)
            answers.append(answer)
            commands += more
        return [*commands, Send(peer, PrefixBlocksReserved(tuple(answers)))]

    def _reserve(self, peer: str, part: PrefixPart, now: float) -> tuple[ReservedPart, list[StoreCommand]]:
        parent = self.cached.get(part.parent) if part.num_before else None
        if part.num_before and (parent is None or parent.depth != part.num_before - 1):
            return ReservedPart(0, is_orphan=True), []
        num_known = 0
        for block in part.blocks:
            known = self.cached.get(block.block_hash)
            if known is None:
                break
            if known.parent is not parent or known.packed_tokens != block.packed_tokens:
                return ReservedPart(len(part.blocks)), []  # another block has its name
            num_known, parent = num_known + 1, known
        rest = part.blocks[num_known:]
        num_written = next((at for at, block in enumerate(rest) if block.block_hash not in self._written_by), len(rest))
        if num_written or not rest:
            return ReservedPart(num_known + num_written), []
        return self._lease(peer, parent, rest, num_known, now)

    def _lease(
        self, peer: str, parent: CachedBlock | None, rest: tuple[PrefixBlock, ...], num_known: int, now: float
    ) -> tuple[ReservedPart, list[StoreCommand]]:
        before = context_of(parent)
        self.cached.acquire(before, is_use=False)
        room = self._allocator.num_free + self.cached.num_unused
        new = rest[: min(self._num_new(rest), room)]
        if not new:
            self.cached.release(before)
            return ReservedPart(num_known), []
        commands = self.make_room(len(new))
        block_ids = self._allocator.allocate(len(new))
        assert block_ids is not None, "room was made for them"
        lease_id = self._take_lease()
        self._writing[lease_id] = _Writing(peer, before, new, block_ids, now + self._lease_s)
        self._written_by.update((block.block_hash, lease_id) for block in new)
        return ReservedPart(num_known, lease_id, block_ids), [*commands, SetBlockGeneration(block_ids, lease_id)]

    def _num_new(self, rest: tuple[PrefixBlock, ...]) -> int:
        seen: set[bytes] = set()
        for block in rest:
            block_hash = block.block_hash
            is_taken = block_hash in seen or block_hash in self._written_by or self.cached.get(block_hash) is not None
            if is_taken:
                break
            seen.add(block_hash)
        return len(seen)

    def _written(self, peer: str, lease_id: LeaseId, checksums: tuple[int, ...]) -> list[StoreCommand]:
        writing = self._writing.get(lease_id)
        if writing is None or writing.worker != peer:
            return []
        del self._writing[lease_id]
        run = list(writing.before)
        for block, block_id, checksum in zip(writing.blocks, writing.block_ids, checksums, strict=False):
            parent = run[-1] if run else None
            stored = self.cached.store(parent, block.block_hash, block.packed_tokens, block_id)
            assert stored is not None, "its name was free while it was written"
            run.append(stored)
            self._checksums[block_id] = checksum
        stored_ids = tuple(block.block_id for block in run[len(writing.before) :])
        self._forget_written(writing)
        freed = self._free(writing.block_ids[len(stored_ids) :])
        if stored_ids:
            self._generation = self._generation or int(self._take_lease())
            freed.insert(0, SetBlockGeneration(stored_ids, self._generation))
        return [*freed, *self._release(run)]

    def _end_writing(self, lease_ids: list[LeaseId]) -> list[StoreCommand]:
        commands: list[StoreCommand] = []
        for lease_id in lease_ids:
            writing = self._writing.pop(lease_id)
            self._forget_written(writing)
            commands += [*self._free(writing.block_ids), *self._release(writing.before)]
        return commands

    def _forget_written(self, writing: _Writing) -> None:
        for block in writing.blocks:
            del self._written_by[block.block_hash]

    def _release(self, run: list[CachedBlock]) -> list[StoreCommand]:
        self.cached.release(run)
        damaged = next((block for block in run if block.block_id in self._damaged and not block.num_users), None)
        return [] if damaged is None else self._free_kept(self.cached.drop(damaged))

    def _free_kept(self, block_ids: list[BlockId]) -> list[StoreCommand]:
        freed = tuple(reversed(block_ids))  # neighbours in order, as they were written
        for block_id in freed:
            del self._checksums[block_id]
        self._damaged.difference_update(freed)
        return self._free(freed)

    def _free(self, block_ids: tuple[BlockId, ...]) -> list[StoreCommand]:
        if not block_ids:
            return []
        self._allocator.free(block_ids)
        return [SetBlockGeneration(block_ids, NO_GENERATION)]

    # --- blocks to read

    def _find(self, peer: str, message: FindPrefix) -> PrefixFound:
        run_found, states = self._behind_state(list(self._kept(message)))
        if not run_found:
            return PrefixFound(message.request_id)
        lent = [*run_found, *states]
        run = context_of(lent[-1])
        self.cached.acquire(run)
        lease_id = self._take_lease()
        self._lent[lease_id] = _Lent(peer, run, message.num_before)
        runs = tuple(BlockRun(block.block_id, 1, self._checksums[block.block_id]) for block in lent)
        copy = BlockCopy(self._generation, len(run_found) * self._block_size, runs, message.num_before)
        return PrefixFound(message.request_id, lease_id, copy, tuple(block.packed_tokens for block in run_found))

    def _behind_state(self, blocks: list[CachedBlock]) -> tuple[list[CachedBlock], list[CachedBlock]]:
        if not self._state_blocks:
            return blocks, []
        for count in range(len(blocks), 0, -1):
            if states := self._states_of(blocks[count - 1]):
                return blocks[:count], states
        return [], []

    def _states_of(self, edge: CachedBlock) -> list[CachedBlock]:
        states: list[CachedBlock] = []
        for name in state_names(edge.block_hash, self._state_blocks):
            block = self.cached.match(states[-1] if states else edge, name)
            if block is None or block.block_id in self._damaged:
                return []
            states.append(block)
        return states

    def _kept(self, message: FindPrefix) -> Iterator[CachedBlock]:
        before: CachedBlock | None = None
        for start in range(0, len(message.hashes), HASH_BYTES):
            block = self.cached.get(message.hashes[start : start + HASH_BYTES])
            if block is None or block.block_id in self._damaged:
                return
            follows = block.depth == message.num_before if before is None else block.parent is before
            if not follows:
                return
            yield block
            before = block

    def _take_back(self, lease_id: LeaseId, *, is_damaged: bool = False) -> list[StoreCommand]:
        lent = self._lent.pop(lease_id)
        if is_damaged:
            self._damaged.update(block.block_id for block in lent.run[lent.first :])
        return self._release(lent.run)

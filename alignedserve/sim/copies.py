"""Copies between memories: how long they take, and whether what they find is still what was meant.

A simulated arena holds no bytes, only the generation stamped on each block, which is what decides in the live system
whether a copy verifies.
"""

from collections.abc import Sequence

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
)
from alignedserve.sim.config import SimLinks
from alignedserve.sim.event_queue import EventQueue

_NOT_SUMMED = 0  # there are no bytes to take a checksum of


class SimulatedArena:
    """Blocks that others may use."""

    __slots__ = ("_stamps", "_stamps_on_write")

    def __init__(self, num_blocks: int, *, stamps_on_write: bool) -> None:
        """`stamps_on_write`: a candidate buffer, whose blocks get their generation from whoever writes them."""
        self._stamps = [0] * num_blocks
        self._stamps_on_write = stamps_on_write

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        """Write this generation on these blocks."""
        stamps = self._stamps
        for block_id in block_ids:
            stamps[block_id] = generation

    def holds(self, copy: BlockCopy) -> bool:
        """Whether what lies in the copy's blocks is what its writer wrote."""
        stamps, generation = self._stamps, copy.generation
        for run in copy.runs:
            if stamps[run.first_block : run.first_block + run.num_blocks].count(generation) != run.num_blocks:
                return False
        return True

    def write(self, block_ids: Sequence[BlockId], generation: int) -> tuple[BlockRun, ...] | None:
        """What was written, or None when the blocks were no longer the writer's."""
        if self._stamps_on_write:
            self.stamp(block_ids, generation)
        runs = tuple(BlockRun(first, count, _NOT_SUMMED) for first, count in contiguous_runs(block_ids))
        return runs if self.holds(BlockCopy(generation, 0, runs)) else None


class MemoryLinks:
    """The links between memories. Each does one copy at a time, in the order in which they were asked for."""

    def __init__(self, event_queue: EventQueue, links: SimLinks, block_bytes: int) -> None:
        self._event_queue = event_queue
        self._links = links
        self._block_bytes = block_bytes
        self._free_at: dict[tuple[str, str], float] = {}

    def completion_s(self, source: str, target: str, num_blocks: int, *, is_host: bool) -> float:
        """When so many blocks that are asked for now will be there. `is_host`: one end is a pool."""
        link = self._links.host if is_host else self._links.device
        begins = max(self._free_at.get((source, target), 0.0), self._event_queue.now)
        ends = begins + link.transfer_s(num_blocks * self._block_bytes)
        self._free_at[source, target] = ends
        return ends


class SimulatedCopier:
    """Performs one worker's copies. Its arenas go by the peer that offered one, or whom it is offered to."""

    def __init__(self, worker: str, pool: str, memory_links: MemoryLinks) -> None:
        self._worker = worker
        self._pool = pool
        self._memory_links = memory_links
        self.arenas: dict[str, SimulatedArena] = {}

    # --- when a copy that begins now will be done

    def load_ends_s(self, command: LoadBlocks) -> float:
        """Of all its requests together."""
        num_blocks = sum(part.copy.num_blocks for part in command.loads)
        return self._ends_s(command.source, self._worker, num_blocks)

    def offload_ends_s(self, command: OffloadBlocks) -> float:
        """Of the request's blocks."""
        return self._ends_s(self._worker, command.target, len(command.target_block_ids))

    def relay_ends_s(self, command: RelayBlocks) -> float:
        """Between the pool and a buffer in this worker's own memory."""
        is_return = command.target == self._pool
        source, target = (self._worker, self._pool) if is_return else (self._pool, self._worker)
        return self._ends_s(source, target, len(command.target_block_ids))

    def _ends_s(self, source: str, target: str, num_blocks: int) -> float:
        return self._memory_links.completion_s(source, target, num_blocks, is_host=self._pool in (source, target))

    # --- what it has come to by then

    def loaded(self, command: LoadBlocks) -> BlocksLoaded:
        """The outcome of a load that is done."""
        arena = self.arenas.get(command.source)
        refused = [part.request_id for part in command.loads if arena is None or not arena.holds(part.copy)]
        return BlocksLoaded(command.source, command.loads, frozenset(refused))

    def offloaded(self, command: OffloadBlocks) -> BlocksOffloaded:
        """The outcome of an offload that is done."""
        arena = self.arenas.get(command.target)
        runs = arena.write(command.target_block_ids, command.generation) if arena is not None else None
        return BlocksOffloaded(command, runs)

    def relayed(self, command: RelayBlocks) -> BlocksRelayed:
        """The outcome of a relay that is done."""
        source, target = self.arenas.get(command.source), self.arenas.get(command.target)
        if source is None or target is None or not source.holds(command.copy):
            return BlocksRelayed(command, None)
        return BlocksRelayed(command, target.write(command.target_block_ids, command.generation))

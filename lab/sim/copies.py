"""Copies between memories: their duration, and whether they verify.

A simulated arena holds no bytes, only the generation stamped on each block, which decides in the live system whether a
copy verifies.
"""

from collections.abc import Callable, Sequence

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
from lab.sim.config import SimLinks, Slowdowns
from lab.sim.event_queue import EventQueue

_NOT_SUMMED = 0  # checksum, as there are no bytes
LENT = " lends"  # ends the name of an arena that another elastic worker lends (alignedserve/worker_core/moves.py)


class SimulatedArena:
    """Blocks that other components may use."""

    __slots__ = ("_stamps", "_stamps_on_write")

    def __init__(self, num_blocks: int, *, stamps_on_write: bool) -> None:
        """`stamps_on_write`: a candidate buffer, whose blocks get their generation from their writer."""
        self._stamps = [0] * num_blocks
        self._stamps_on_write = stamps_on_write

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        stamps = self._stamps
        for block_id in block_ids:
            stamps[block_id] = generation

    def holds(self, copy: BlockCopy) -> bool:
        """Return True if the copy's blocks still hold what its writer wrote."""
        stamps, generation = self._stamps, copy.generation
        for run in copy.runs:
            if stamps[run.first_block : run.first_block + run.num_blocks].count(generation) != run.num_blocks:
                return False
        return True

    def write(
        self, block_ids: Sequence[BlockId], generation: int, *, is_by_block: bool = False
    ) -> tuple[BlockRun, ...] | None:
        """Write blocks; return the runs written (`is_by_block`: of one block each).

        None: the blocks no longer belong to the writer.
        """
        if self._stamps_on_write:
            self.stamp(block_ids, generation)
        written = [(block_id, 1) for block_id in block_ids] if is_by_block else contiguous_runs(block_ids)
        runs = tuple(BlockRun(first, count, _NOT_SUMMED) for first, count in written)
        return runs if self.holds(BlockCopy(generation, 0, runs)) else None


class MemoryLinks:
    """The links between memories. Each makes one copy at a time, in order of the requests."""

    def __init__(self, event_queue: EventQueue, links: SimLinks, block_bytes: int) -> None:
        self._event_queue = event_queue
        self._links = links
        self._block_bytes = block_bytes
        self._free_at: dict[tuple[str, str], float] = {}
        self.node_of: dict[str, str] = {}  # workers, by the pools of their nodes

    def completion_s(self, source: str, target: str, num_blocks: int, *, is_host: bool, is_far: bool = False) -> float:
        """Queue a copy and return when it will be complete.

        `is_host`: one end is in the memory of a host. `is_far`: the other is on another node.
        """
        link = self._links.host if is_host else self._links.device
        if is_far:
            link = self._links.network or self._links.device
        begins = max(self._free_at.get((source, target), 0.0), self._event_queue.now)
        ends = begins + link.transfer_s(num_blocks * self._block_bytes)
        self._free_at[source, target] = ends
        return ends

    @property
    def now(self) -> float:
        return self._event_queue.now

    def are_far(self, source: str, target: str) -> bool:
        nodes = self.node_of.get(source), self.node_of.get(target)
        return None not in nodes and nodes[0] != nodes[1]


class SimulatedCopier:
    """Performs one worker's copies. Arenas are keyed by peer, offering or offered."""

    def __init__(self, worker: str, pool: str, memory_links: MemoryLinks, *, is_through_host: bool = False) -> None:
        self._is_through_host = is_through_host
        self._worker = worker
        self.pool = pool
        self._memory_links = memory_links
        memory_links.node_of[worker] = pool
        self.arenas: dict[str, SimulatedArena] = {}
        self._far_s: dict[int, float] = {}  # of loads from other nodes under way, by the id of their command

    # --- when a copy that begins now will be complete

    def load_ends_s(self, command: LoadBlocks) -> float:
        num_blocks = sum(part.copy.num_blocks for part in command.loads)
        is_far = self._memory_links.are_far(command.source.removesuffix(LENT), self._worker)
        ends_s = self._ends_s(command.source, self._worker, num_blocks, is_far=is_far)
        if is_far:
            self._far_s[id(command)] = ends_s - self._memory_links.now
        return ends_s

    def offload_ends_s(self, command: OffloadBlocks) -> float:
        return self._ends_s(self._worker, command.target, len(command.target_block_ids))

    def relay_ends_s(self, command: RelayBlocks) -> float:
        """Return when a relay between the pool and a buffer in this worker's memory will be complete."""
        is_return = command.target == self.pool
        source, target = (self._worker, self.pool) if is_return else (self.pool, self._worker)
        return self._ends_s(source, target, len(command.target_block_ids))

    def _ends_s(self, source: str, target: str, num_blocks: int, *, is_far: bool = False) -> float:
        is_host = self._is_through_host or self.pool in (source, target)
        return self._memory_links.completion_s(source, target, num_blocks, is_host=is_host, is_far=is_far)

    # --- outcomes

    def loaded(self, command: LoadBlocks) -> BlocksLoaded:
        arena = self.arenas.get(command.source)
        refused = [part.request_id for part in command.loads if arena is None or not arena.holds(part.copy)]
        return BlocksLoaded(command.source, command.loads, frozenset(refused), self._far_s.pop(id(command), 0.0))

    def offloaded(self, command: OffloadBlocks) -> BlocksOffloaded:
        arena = self.arenas.get(command.target)
        if arena is None:
            return BlocksOffloaded(command, None)
        is_by_block = command.num_before is not None
        runs = arena.write(command.target_block_ids, command.generation, is_by_block=is_by_block)
        return BlocksOffloaded(command, runs)

    def relayed(self, command: RelayBlocks) -> BlocksRelayed:
        source, target = self.arenas.get(command.source), self.arenas.get(command.target)
        if source is None or target is None or not source.holds(command.copy):
            return BlocksRelayed(command, None)
        return BlocksRelayed(command, target.write(command.target_block_ids, command.generation))


class Job:
    """A running iteration."""

    __slots__ = ("has_prompt", "left_s", "on_done", "speed")

    def __init__(self, left_s: float, has_prompt: bool, on_done: Callable[[], None]) -> None:
        self.left_s = left_s  # by itself
        self.has_prompt = has_prompt
        self.speed = 1.0
        self.on_done = on_done


class SharedCores:
    """The cores of one machine."""

    def __init__(self, event_queue: EventQueue, slowdowns: Slowdowns) -> None:
        self._event_queue = event_queue
        self._slowdowns = slowdowns
        self._jobs: list[Job] = []
        self._settled_s = 0.0  # the time at which `left_s` was settled
        self._version = 0  # of the schedule; the end of an earlier one is void

    def begin(self, duration_s: float, has_prompt: bool, on_done: Callable[[], None]) -> Job:
        """Begin an iteration that takes `duration_s` by itself; `on_done` is called at its end."""
        self._settle()
        job = Job(duration_s, has_prompt, on_done)
        self._jobs.append(job)
        self._plan()
        return job

    def stop(self, job: Job, *, part_s: float, urgent_s: float) -> tuple[float, float]:
        """Let a running iteration stand still, from the end of the part of `part_s` that it is in, for another one.

        Return when that begins and ends, at the present speed.
        """
        self._settle()
        begins_s = self._settled_s + max(job.left_s, 0.0) % part_s / job.speed
        job.left_s += urgent_s
        self._plan()
        return begins_s, begins_s + urgent_s / job.speed

    def _settle(self) -> None:
        now = self._event_queue.now
        for job in self._jobs:
            job.left_s -= (now - self._settled_s) * job.speed
        self._settled_s = now

    def _plan(self) -> None:
        self._version += 1
        num_prompts = sum(job.has_prompt for job in self._jobs)
        for job in self._jobs:
            others = num_prompts - job.has_prompt
            by_prompts = self._slowdowns.of(has_prompt=job.has_prompt, has_other_prompt=True)
            by_decodes = self._slowdowns.of(has_prompt=job.has_prompt, has_other_prompt=False)
            job.speed = 1.0 / (1.0 + others * by_prompts + (len(self._jobs) - 1 - others) * by_decodes)
        if self._jobs:
            soonest_s = min(job.left_s / job.speed for job in self._jobs)
            self._event_queue.after(max(soonest_s, 0.0), self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        ended = min(self._jobs, key=lambda job: job.left_s / job.speed)
        self._jobs.remove(ended)
        self._plan()
        ended.on_done()

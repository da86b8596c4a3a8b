"""The memory that a prefill worker lends: a candidate buffer for each decode worker that is linked to it.

A buffer lies in the memory of the worker's GPU where it has one, else in an arena of its own in host memory. It is made
when the decode worker connects and removed when it disconnects, so that late writes of an earlier epoch hit nothing
that is valid. The decode worker decides on its content (AlignedServe, section 3.4).

A worker's copies between its storage, the pool's arena and candidate buffers, in parallel with its computing.

Every peer has its own copying thread, so that a slow or lost peer delays no other, and copies with one peer happen in
the order in which they were requested."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory, PeerError, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    CloseBuffer,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    UnmapArena,
)
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.accelerator import Accelerator, copying, working
from alignedserve.runtime.device.cores import threads_per_copy
from alignedserve.runtime.kv.arena_files import ARENA_SUFFIX, arena_path, remove_stale_arenas
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO, SHM, FetchRequest, KVTransfer, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import (
    LocalMemory,
    LocalTransfer,
    OwnBufferTransfer,
    ShmTransfer,
    relay,
)
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, RankCopies, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import open_transfer
from alignedserve.runtime.kv.transfers.requests import DeviceBuffer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BlockCopier:
    """Performs LoadBlocks, OffloadBlocks and RelayBlocks. Methods return at once; results go to callbacks on the loop.
    When a transfer cannot be opened, or its other end is gone, every copy of that call is refused; the next call opens
    a new one."""

    def __init__(
        self,
        storage: BlockStorage,
        threads: WorkerThreads,
        identity: Identity,
        *,
        transport: str = AUTO,
        ranks: RankCopies | None = None,
    ) -> None:
        """`ranks`: those beside this one, where the storage has only its parts of the blocks."""
        self._storage = storage
        self._threads = threads
        self._identity = identity
        self._transport = transport
        self._ranks = ranks
        self._offers: dict[str, tuple[ArenaOffered, bool]] = {}
        self._transfers: dict[str, KVTransfer] = {}
        self._num_submitted: dict[str, int] = {}  # by peer that has a thread

    # --- called on the loop

    def map_arena(self, peer: str, offered: ArenaOffered, *, stamps: bool) -> None:
        """Use this arena of the peer from now on. `stamps`: it is a candidate buffer (see ShmTransfer)."""
        self._offers[peer] = (offered, stamps)
        self._submit(peer, lambda: self._open(peer), _ignore)

    def use_buffer(
        self, peer: str, memory: LocalMemory, offered: ArenaOffered, on_used: Callable[[bool], None]
    ) -> None:
        """Use this buffer of this process, made for the peer and offered so. The creator removes the buffer. `on_used`
        takes whether every rank can use it."""
        self._offers.pop(peer, None)
        self._submit(peer, lambda: self._replace(peer, memory, offered), on_used)

    def unmap_arena(self, peer: str) -> None:
        """Stop using the arena of a peer that is gone. Its thread ends, unless it is back by then."""
        self._offers.pop(peer, None)
        self._submit(peer, lambda: self._release(peer), lambda _: self._end_thread(peer, num_submitted))
        num_submitted = self._num_submitted[peer]

    def start_load(self, command: LoadBlocks, on_done: Callable[[BlocksLoaded], None]) -> None:
        """Copy in, all in one transfer, and verify."""
        self._submit(command.source, lambda: self._load(command), on_done)

    def start_offload(self, command: OffloadBlocks, on_done: Callable[[BlocksOffloaded], None]) -> None:
        """Copy out."""
        self._submit(command.target, lambda: self._offload(command), on_done)

    def start_relay(self, command: RelayBlocks, peer: str, on_done: Callable[[BlocksRelayed], None]) -> None:
        """Copy from arena to arena, on the thread of this one of the two peers."""
        self._submit(peer, lambda: self._relay(command, peer), on_done)

    def close(self) -> None:
        """Close the connections to other processes, once the threads have ended."""
        for peer in list(self._transfers):
            self._release(peer)

    def _submit(self, peer: str, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        def working_on_device() -> T:
            with working(self._storage.device):
                return work()

        self._num_submitted[peer] = self._num_submitted.get(peer, 0) + 1
        self._threads.submit(_thread_of(peer), working_on_device, on_done)

    def _end_thread(self, peer: str, num_submitted: int) -> None:
        if self._num_submitted.get(peer) == num_submitted:
            del self._num_submitted[peer]
            self._threads.end(_thread_of(peer))

    # --- on the threads

    def _load(self, command: LoadBlocks) -> BlocksLoaded:
        transfer = self._transfer(command.source)
        requests = [FetchRequest(part.copy, part.block_ids) for part in command.loads]
        held: list[bool] | None = None
        began_s = time.monotonic()
        if transfer is not None:
            try:
                with copying(self._storage.device):
                    held = transfer.fetch(requests)
            except PeerError as error:
                self._fail(command.source, error)
        duration_s = time.monotonic() - began_s
        if held is None:
            every = frozenset(part.request_id for part in command.loads)
            return BlocksLoaded(command.source, command.loads, every, duration_s, is_reached=False)
        refused = [part.request_id for part, is_held in zip(command.loads, held, strict=True) if not is_held]
        for request_id in refused:
            logger.warning("request %s: its copy at %s does not verify", request_id, command.source)
        return BlocksLoaded(command.source, command.loads, frozenset(refused), duration_s)

    def _offload(self, command: OffloadBlocks) -> BlocksOffloaded:
        transfer = self._transfer(command.target)
        if transfer is None:
            return BlocksOffloaded(command, None)
        request = OffloadRequest(command.block_ids, command.target_block_ids, command.generation, command.num_before)
        try:
            with copying(self._storage.device):
                return BlocksOffloaded(command, transfer.offload([request])[0])
        except PeerError as error:
            self._fail(command.target, error)
            return BlocksOffloaded(command, None)

    def _relay(self, command: RelayBlocks, peer: str) -> BlocksRelayed:
        source, target = self._transfer(command.source), self._transfer(command.target)
        ids, generation = command.target_block_ids, command.generation
        runs, is_reached = None, source is not None and target is not None
        try:
            with copying(self._storage.device):
                if isinstance(source, RankedTransfer) and isinstance(target, RankedTransfer):
                    runs = source.relay_to(target, command.copy, ids, generation)
                elif isinstance(source, LocalTransfer) and isinstance(target, LocalTransfer):
                    runs = relay(source, command.copy, target, ids, generation)
        except PeerError as error:
            self._fail(peer, error)
            is_reached = False
        return BlocksRelayed(command, runs, is_reached)

    def _transfer(self, peer: str) -> KVTransfer | None:
        known, entry = self._transfers.get(peer), self._offers.get(peer)
        if known is not None or entry is None:
            return known
        offered, stamps = entry
        # Pools offer no choice: memory of this host is mapped, that of another is read by tcp.
        transport = self._transport if stamps else AUTO
        try:
            opened = self._opened(peer, PartsOffer(offered, self._identity, stamps, transport))
        except (PeerError, TransportUnavailable) as error:
            logger.error("the blocks of %s cannot be reached: %s", peer, error)
            return None
        self._transfers[peer] = opened
        return opened

    def _opened(self, peer: str, offer: PartsOffer) -> KVTransfer:
        transfer = open_transfer(
            offer.offered, self._storage, identity=offer.identity, stamps=offer.stamps, transport=offer.transport
        )
        if self._ranks is None:
            return transfer
        opened = RankedTransfer(transfer, self._ranks, peer)
        try:
            self._ranks.open(peer, offer)
        except (PeerError, TransportUnavailable):
            opened.close()
            raise
        return opened

    def _open(self, peer: str) -> None:
        self._release(peer)
        self._transfer(peer)

    def _fail(self, peer: str, error: PeerError) -> None:
        logger.warning("the transfer with %s broke: %s", peer, error)
        self._release(peer)

    def _release(self, peer: str) -> None:
        transfer = self._transfers.pop(peer, None)
        # A relay on another thread may still use a mapping: it is unmapped when its last user drops it.
        if transfer is not None and not isinstance(transfer, ShmTransfer):
            transfer.close()

    def _replace(self, peer: str, memory: LocalMemory, offered: ArenaOffered) -> bool:
        self._release(peer)
        if self._ranks is not None:
            try:
                self._transfers[peer] = self._opened(peer, PartsOffer(offered, self._identity, True, SHM))
            except (PeerError, TransportUnavailable) as error:
                self._ranks.close(peer)
                logger.warning("no candidate buffer for %s: %s", peer, error)
                return False
            return True
        if isinstance(memory, DeviceBuffer):
            self._transfers[peer] = OwnBufferTransfer(self._storage, memory)
            return True
        lanes, num_threads = self._storage.lanes, threads_per_copy()
        self._transfers[peer] = ShmTransfer(self._storage, memory, stamps=True, num_threads=num_threads, lanes=lanes)
        return True


def _thread_of(peer: str) -> str:
    return f"copy {peer}"


def _ignore(nothing: None) -> None:
    """Ignore a work item without a result; its exceptions are raised before."""


BUFFER_SETTING = "prefill.candidate_buffer_bytes"


class LentRows:
    """Rows uint8 [num_rows, row_bytes] of one device, in all no more than `max_rows` unless those in use are more. A
    process that maps memory counts as its user until it unmaps. A lost process never unmaps, so its memory would never
    be freed. So memory is kept and lent again rather than freed."""

    def __init__(self, accelerator: Accelerator, max_rows: int, row_bytes: int) -> None:
        self._accelerator = accelerator
        self._max_rows = max_rows
        self._row_bytes = row_bytes
        self._num_used = 0
        self._spare: list[Tensor] = []
        self._returned: deque[Tensor] = deque()

    def take(self, num_rows: int) -> Tensor:
        """Return at least this many rows, with any content; from one thread. Raises NotEnoughMemory."""
        while self._returned:
            rows = self._returned.popleft()
            self._num_used -= len(rows)
            self._spare.append(rows)
        rows = self._fitting(num_rows)
        self._num_used += len(rows)
        return rows

    def give_back_after(self, user: object, rows: Tensor) -> None:
        """Take the rows back once nothing refers to their user: no copy can be under way then."""
        weakref.finalize(user, self._returned.append, rows).atexit = False

    def _fitting(self, num_rows: int) -> Tensor:
        self._spare.sort(key=len)
        for index, rows in enumerate(self._spare):
            if len(rows) >= num_rows:
                return self._spare.pop(index)
        if self._num_used + sum(map(len, self._spare)) + num_rows > self._max_rows:
            self._spare.clear()  # all too small
        return self._accelerator.lendable(num_rows, self._row_bytes)


class DeviceLender:
    """Lends blocks of one layout, in all no more than `max_blocks` unless those in use are more. From any thread."""

    def __init__(self, layout: BlockLayout, lanes: CopyLanes, max_blocks: int) -> None:
        self._layout = layout
        self._lanes = lanes
        self._lock = threading.Lock()
        self._rows = LentRows(lanes.accelerator, max_blocks, layout.block_bytes)

    def lend(self, num_blocks: int) -> DeviceBuffer:
        """Return a buffer whose memory is lent again once nothing refers to it. Raises NotEnoughMemory."""
        try:
            with self._lock:
                rows = self._rows.take(num_blocks)
        except NotEnoughMemory as error:
            raise NotEnoughMemory(f"{error}; set {BUFFER_SETTING} lower") from error
        buffer = DeviceBuffer(self._layout, rows[:num_blocks], self._lanes)
        self._rows.give_back_after(buffer, rows)
        return buffer


_PURPOSE = "a candidate buffer"


class OpenedBuffer(NamedTuple):
    """One decode worker's buffer."""

    memory: LocalMemory
    offered: ArenaOffered
    server: BlockServer | None


class CandidateMemory:
    """The buffers by decode worker. Runs on the worker's event loop; creating one takes milliseconds."""

    def __init__(
        self,
        layout: BlockLayout,
        budget: BufferBudget,
        process_spec: ProcessSpec,
        *,
        transport: str = AUTO,
        lanes: CopyLanes | None = None,
    ) -> None:
        """`layout`: of whole blocks. `transport`: engine.kv_transport. `lanes`: of the worker's device, in whose
        memory the buffers are; None: they are in the host's."""
        self._layout = layout
        self._budget = budget
        self._kv_transport = transport
        self._process_spec = process_spec
        self._opened: dict[str, OpenedBuffer] = {}
        self._num_made = 0
        self._lanes = lanes
        self._lender: DeviceLender | None = None
        if self._lanes is not None:
            self._lender = DeviceLender(layout, self._lanes, budget.num_blocks)
        else:
            with contextlib.suppress(NotEnoughMemory):  # no folder for arenas, which `open_for` logs
                path = arena_path(self._process_spec.cluster_id, f"{self._process_spec.name}-for-")
                remove_stale_arenas(path.parent, path.name.removesuffix(ARENA_SUFFIX))

    def open_for(self, peer: str) -> OpenedBuffer | None:
        """Create a new buffer in place of any earlier one; None (and a log line) when memory is short."""
        self.close_for(peer)
        num_blocks = self._budget.lend(peer)
        if num_blocks < 1:
            logger.info("no candidate buffer for %s: all of prefill.candidate_buffer_bytes is lent", peer)
            return None
        self._num_made += 1
        try:
            memory = self._make(peer, num_blocks)
        except NotEnoughMemory as error:
            logger.warning("no candidate buffer for %s: %s", peer, error)
            return None
        # Also for one that was added here later: shared memory reaches it, and the server does no harm.
        is_far = bool(self._beyond_node) and not self._budget.is_planned_here(peer)
        transports = self._transports(is_far=is_far)
        try:
            server = self._serve(memory, transports, is_far=is_far) if transports else None
        except OSError as error:  # such as no more file descriptors
            _remove(memory)
            logger.warning("no candidate buffer for %s: it cannot be served: %s", peer, error)
            return None
        offered = self._offer(memory, server, transports)
        opened = self._opened[peer] = OpenedBuffer(memory, offered, server)
        return opened

    def is_open(self, peer: str, opened: OpenedBuffer) -> bool:
        """Return whether this is still the buffer of the peer."""
        return self._opened.get(peer) is opened

    def close_for(self, peer: str) -> None:
        """Release the buffer; its memory is free once no process maps it."""
        self._budget.give_back(peer)
        opened = self._opened.pop(peer, None)
        if opened is None:
            return
        if opened.server is not None:
            opened.server.close()
        _remove(opened.memory)

    def close(self) -> None:
        """Release all buffers."""
        for peer in list(self._opened):
            self.close_for(peer)

    @property
    def _beyond_node(self) -> tuple[str, ...]:
        return self._process_spec.addresses.beyond_node()

    def _make(self, peer: str, num_blocks: int) -> LocalMemory:
        if self._lender is None:
            name = f"{self._process_spec.name}-for-{peer}-{self._num_made}"
            path = arena_path(self._process_spec.cluster_id, name)
            return Arena.create(path, self._layout, num_blocks, purpose=_PURPOSE, setting=BUFFER_SETTING)
        return self._lender.lend(num_blocks)

    def _transports(self, *, is_far: bool) -> tuple[str, ...]:
        chosen = self._kv_transport
        if self._lanes is not None:
            if chosen != AUTO:
                return (chosen,)
            return ("tcp",) if is_far else ("cuda_ipc", "tcp")
        if chosen in (AUTO, "shm"):
            return ("tcp",) if is_far else ()
        return (chosen,)

    def _serve(self, memory: LocalMemory, transports: tuple[str, ...], *, is_far: bool) -> BlockServer:
        return BlockServer(
            ArenaBuffer(memory) if isinstance(memory, Arena) else memory,
            self._new_address(is_far=is_far),
            identity=self._process_spec.identity(),
            transports=transports,
            open_channel=open_channel,
        )

    def _new_address(self, *, is_far: bool) -> str:
        if is_far:
            (address,) = self._beyond_node
            return address
        # No longer than the name of a process: a run folder is refused only where those do not fit (run_folder.py).
        return self._process_spec.addresses.of(f"b-{secrets.token_hex(4)}")

    def _offer(self, memory: LocalMemory, server: BlockServer | None, transports: tuple[str, ...]) -> ArenaOffered:
        is_file = isinstance(memory, Arena)
        return ArenaOffered(
            str(memory.path) if isinstance(memory, Arena) else "",
            memory.num_blocks,
            self._layout.block_bytes,
            self._layout.digest().hex(),
            served_at=server.address if server is not None else "",
            transports=("shm", *transports) if is_file else transports,
            file_id=memory.file_id if isinstance(memory, Arena) else "",
            pool_name=self._process_spec.pool_name,
        )


def _remove(memory: LocalMemory) -> None:
    if isinstance(memory, Arena):
        memory.path.unlink(missing_ok=True)


CopyCommand = LoadBlocks | OffloadBlocks | MapArena | UnmapArena | OpenBuffer | CloseBuffer
CopyEvent = BlocksLoaded | BlocksOffloaded | BufferOpened


class LendingCopier:
    """Performs the copy commands of one worker."""

    def __init__(self, copier: BlockCopier, memory: CandidateMemory | None) -> None:
        """`memory`: None: it lends none."""
        self._copier = copier
        self._memory = memory

    def perform(self, command: CopyCommand, dispatch: Callable[[CopyEvent], None]) -> None:
        """Start it; `dispatch` takes its outcome, later."""
        match command:
            case LoadBlocks():
                self._copier.start_load(command, dispatch)
            case OffloadBlocks():
                self._copier.start_offload(command, dispatch)
            case MapArena(peer, offered, stamps):
                self._copier.map_arena(peer, offered, stamps=stamps)
            case UnmapArena(peer):
                self._copier.unmap_arena(peer)
            case OpenBuffer(peer, link_epoch):
                self._open_buffer(peer, link_epoch, dispatch)
            case CloseBuffer(peer):
                self._copier.unmap_arena(peer)
                self._lent().close_for(peer)

    def start_relay(self, command: RelayBlocks, buffer_of: str, dispatch: Callable[[BlocksRelayed], None]) -> None:
        """Start a copy between a pool and the buffer that is lent to this decode worker."""
        self._copier.start_relay(command, buffer_of, dispatch)

    def close(self) -> None:
        """Close the transfers and free the memory, once the threads have ended."""
        self._copier.close()
        if self._memory is not None:
            self._memory.close()

    def _lent(self) -> CandidateMemory:
        assert self._memory is not None, "a buffer of a worker that lends none"
        return self._memory

    def _open_buffer(self, peer: str, link_epoch: int, dispatch: Callable[[CopyEvent], None]) -> None:
        memory = self._lent()
        opened = memory.open_for(peer)
        if opened is None:
            # Not within the dispatch that asked for it: the rest of its commands comes first.
            asyncio.get_running_loop().call_soon(dispatch, BufferOpened(peer, link_epoch, None))
            return

        def used(*, is_used: bool) -> None:
            if not is_used and memory.is_open(peer, opened):
                memory.close_for(peer)
            dispatch(BufferOpened(peer, link_epoch, opened.offered if is_used else None))

        self._copier.use_buffer(peer, opened.memory, opened.offered, lambda is_used: used(is_used=is_used))

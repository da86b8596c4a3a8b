"""The client's requests to a block server: plans requests that can succeed, and receives the owner's answers.

A candidate buffer in device memory."""

import abc
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerError, PeerLost, ProtocolError
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemoryHandle,
    NamedBlocks,
    OpenTransfer,
    ReadBlocks,
    TransferOpened,
    TransferRefused,
    WriteBlocks,
)
from alignedserve.messages.caches import BlockRun
from alignedserve.process.links import Identity
from alignedserve.runtime.device.accelerator import SharedRows
from alignedserve.runtime.kv.block_checksums import (
    check_target,
    expand_runs,
    run_checksums,
    runs_with_checksums,
    source_blocks,
)
from alignedserve.runtime.kv.block_runs import BlockIds, BlockRuns, Ints, PlacedRuns, as_ids, join_placed, place_runs
from alignedserve.runtime.kv.block_storage import BlockStorage, DevicePieces
from alignedserve.runtime.kv.direct_copies import PeerSide
from alignedserve.runtime.kv.shm_arena import NO_LEASE, WHOLE, ArenaPart
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.block_server import CLIENT_RANK, BlockStream
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket, dial
from alignedserve.runtime.kv.transfers.host_blocks import HostBlocks
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, verified
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from kernels.cpu.block_copies import BlockList
from kernels.cpu.row_digest import WORD_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a call that passed the client's checks."""

    index: int  # in the call
    storage_block_ids: Sequence[BlockId]
    named: NamedBlocks  # the owner's blocks, as many
    num_before: int = 0  # blocks of a prefix before them

    @property
    def runs(self) -> PlacedRuns:
        return place_runs([count for _, count in self.named.runs], self.num_before)


class ServedTransfer(abc.ABC):
    """KVTransfer to a block server, whose connection is opened by a subclass, which also moves the bytes. After
    PeerLost the object is unusable: make a new one."""

    _storage: BlockStorage
    _control: ControlSocket
    _num_blocks: int  # of the server

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        planned = plan_offload(requests, self._num_blocks)
        done: list[tuple[BlockRun, ...] | None] = [None] * len(requests)
        if planned:
            with closing_on_error(self._control):
                sent = self._offload(planned)
            for request, checksums in zip(planned, sent, strict=True):
                if checksums is not None:
                    done[request.index] = runs_with_checksums(BlockRuns.named(request.named.runs), checksums)
        return done

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        return verified(requests, self.fetch_unverified(requests))

    def fetch_unverified(self, requests: Sequence[FetchRequest]) -> list[list[int] | None]:
        planned = plan_fetch(requests, self._storage.layout, self._num_blocks)
        done: list[list[int] | None] = [None] * len(requests)
        if planned:
            with closing_on_error(self._control):
                received = self._fetch(planned)
            for one, checksums in zip(planned, received, strict=True):
                done[one.index] = checksums
                if checksums is None:
                    logger.warning("fetch of generation %d refused: the lease is no longer valid", one.named.generation)
        return done

    def close(self) -> None:
        self._control.close()

    @abc.abstractmethod
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        """Return the checksums of each request's sent runs; None: the server refused it."""

    @abc.abstractmethod
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        """Return the checksums of each request's received runs; None: the server no longer holds the blocks."""

    def _granted(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        return [request for request, held in zip(planned, receive_answers(self._control, planned), strict=True) if held]

    def _settled(
        self, planned: Sequence[PlannedRequest], granted: Sequence[PlannedRequest], checksums: Sequence[int]
    ) -> list[list[int] | None]:
        in_order = iter(checksums)
        by_index = {request.index: list(islice(in_order, len(request.named.runs))) for request in granted}
        is_held = receive_answers(self._control, planned)
        return [by_index.get(request.index) if held else None for request, held in zip(planned, is_held, strict=True)]


def negotiate(control: ControlSocket, transport: str, storage: BlockStorage) -> TransferOpened:
    """Agree on a transport, and on the part that this end copies. Raises HandoffRejected with the owner's reason."""
    part = storage.part
    control.send(OpenTransfer(transport, part.whole(storage.layout).digest().hex(), part.rank, part.size))
    match control.receive():
        case TransferOpened() as opened:
            return opened
        case TransferRefused(reason=reason):
            raise HandoffRejected(f"the owner of the blocks refuses: {reason}")
        case _:
            raise ProtocolError("the owner of the blocks sent another message than an answer")


def plan_offload(requests: Sequence[OffloadRequest], num_blocks: int) -> list[PlannedRequest]:
    planned = []
    for index, wanted in enumerate(requests):
        try:
            check_target(as_ids(wanted.target_block_ids), len(wanted.storage_block_ids), wanted.generation, num_blocks)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", wanted.generation, error)
            continue
        named = NamedBlocks(wanted.generation, wanted.runs.pairs())
        planned.append(PlannedRequest(index, wanted.storage_block_ids, named, wanted.num_before or 0))
    return planned


def plan_fetch(requests: Sequence[FetchRequest], layout: BlockLayout, num_blocks: int) -> list[PlannedRequest]:
    planned = []
    for index, request in enumerate(requests):
        copy, targets = request.copy, request.storage_block_ids
        try:
            blocks = source_blocks(copy, layout=layout, num_targets=len(targets), num_blocks=num_blocks)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            continue
        named = NamedBlocks(copy.generation, tuple((run.first_block, run.num_blocks) for run in copy.runs))
        planned.append(PlannedRequest(index, targets[: len(blocks)], named, copy.num_before))
    return planned


def receive_answers(control: ControlSocket, planned: Sequence[PlannedRequest]) -> tuple[bool, ...]:
    answer = control.receive()
    if not isinstance(answer, BlocksAnswered) or len(answer.is_held) != len(planned):
        raise ProtocolError(f"the owner of the blocks gave no answer about all {len(planned)} requests")
    return answer.is_held


def blocks_in_order(planned: Sequence[PlannedRequest]) -> list[BlockId]:
    """Return this end's blocks of all requests, in the order in which their bytes travel."""
    return [block_id for request in planned for block_id in request.storage_block_ids]


def runs_in_order(planned: Sequence[PlannedRequest]) -> PlacedRuns:
    """Return the runs of all requests, in the order in which their bytes travel."""
    return join_placed(request.runs for request in planned)


@contextlib.contextmanager
def closing_on_error(control: ControlSocket) -> Iterator[None]:
    """Close the connection on any error in the middle of an exchange; a peer's error becomes PeerLost."""
    try:
        yield
    except PeerError as error:
        control.close()
        raise PeerLost(f"a block transfer broke off: {error}") from error
    except BaseException:
        control.close()
        raise


class ChannelTransfer(ServedTransfer):
    """KVTransfer to a block server. Connects on construction. Raises PeerLost when the server is unreachable or has
    another secret, HandoffRejected when it does not serve this transport or this block layout."""

    def __init__(self, storage: BlockStorage, address: str, *, identity: Identity, transport: str = "gloo") -> None:
        self._storage = storage
        self._memory = HostBlocks(storage)
        self._control = dial(address, identity)
        try:
            self._num_blocks = negotiate(self._control, transport, storage).num_blocks
            self._channel = open_channel(
                self._control,
                CLIENT_RANK,
                transport=transport,
                block_bytes=storage.layout.block_bytes,
                timeout_s=identity.peer_timeout_s,
            )
        except PeerError:
            self._control.close()
            raise

    @override
    def close(self) -> None:
        super().close()
        self._channel.close()

    @override
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        sources = blocks_in_order(planned)
        self._storage.pending_copies.synchronize(np.array(sources, np.int64))
        checksums = self._memory.checksums(runs_in_order(planned))

        def fill(first: int, rows: Tensor) -> None:
            self._memory.gather(sources[first : first + len(rows)], rows, checksums)

        self._control.send(WriteBlocks(tuple(request.named for request in planned)))
        if isinstance(self._channel, BlockStream):
            self._channel.send_lists(self._memory.lists_to_send(sources, checksums))
        else:
            self._channel.send(len(sources), fill)
        return self._settled(planned, planned, checksums.values)

    @override
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(ReadBlocks(tuple(request.named for request in planned)))
        granted = self._granted(planned)
        targets = blocks_in_order(granted)
        self._storage.pending_copies.synchronize(np.array(targets, np.int64))
        checksums = self._memory.checksums(runs_in_order(granted))

        def take(first: int, rows: Tensor) -> None:
            self._memory.scatter(targets[first : first + len(rows)], rows, checksums)

        if isinstance(self._channel, BlockStream):
            self._channel.receive_lists(self._memory.lists_to_fill(targets, checksums))
        else:
            self._channel.receive(len(targets), take)
        return self._settled(planned, granted, checksums.values)


class IpcTransfer(ServedTransfer):
    """KVTransfer to a block server of this host whose buffer is mapped here. Connects on construction. Raises PeerLost
    or HandoffRejected as ChannelTransfer does, and HandoffRejected when the memory cannot be mapped."""

    def __init__(self, storage: BlockStorage, address: str, *, identity: Identity, lanes: CopyLanes) -> None:
        """`lanes`: of the storage's device."""
        self._storage = storage
        self._lanes = lanes
        self._control = dial(address, identity)
        try:
            opened = negotiate(self._control, "cuda_ipc", storage)
            self._num_blocks = opened.num_blocks
            self._theirs: Tensor | None = _mapped(opened, lanes, storage.layout.block_bytes)
        except PeerError:
            self._control.close()
            raise

    @override
    def close(self) -> None:
        """Unmaps the memory before the owner of it learns that it may be given away."""
        self._theirs = None
        super().close()

    @override
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(WriteBlocks(tuple(request.named for request in planned)))
        granted = self._granted(planned)
        with self._lanes.direct() as copies:
            digests = copies.copy_out(self._storage.bytes, self._own_blocks(granted), self._their_side(granted))
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, run_checksums(digests, runs_in_order(granted)))

    @override
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(ReadBlocks(tuple(request.named for request in planned)))
        granted = self._granted(planned)
        with self._lanes.direct() as copies:
            digests = copies.copy_in(self._their_side(granted), self._storage.bytes, self._own_blocks(granted))
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, run_checksums(digests, runs_in_order(granted)))

    def _own_blocks(self, planned: Sequence[PlannedRequest]) -> Ints:
        return self._storage.settled(np.array(blocks_in_order(planned), np.int64))

    def _their_side(self, planned: Sequence[PlannedRequest]) -> PeerSide:
        assert self._theirs is not None, "a transfer after it was closed"
        parts = [expand_runs(request.named.runs, self._num_blocks) for request in planned]
        return PeerSide(self._theirs, np.concatenate([np.empty(0, np.int64), *parts]))


def _mapped(opened: TransferOpened, lanes: CopyLanes, block_bytes: int) -> Tensor:
    if opened.device_memory is None:
        raise HandoffRejected("the blocks are not in a device's memory")
    lanes.accelerator.use()
    handle = SharedRows(*msgspec.structs.astuple(opened.device_memory))
    return lanes.accelerator.mapped(handle, opened.num_blocks, block_bytes)


class DeviceBuffer:
    """A ServedBuffer with blocks on a device and their generations on the host; outlives its block server."""

    def __init__(self, layout: BlockLayout, blocks: Tensor, lanes: CopyLanes) -> None:
        """`blocks`: lendable rows uint8 [num_blocks, block_bytes], of any content, on the device of the lanes."""
        assert layout.block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        self.layout = layout
        self.writer_stamps = True
        self.num_blocks = len(blocks)
        self.lanes = lanes
        self.blocks = blocks
        self.generations: npt.NDArray[np.uint64] = np.zeros(len(blocks), np.uint64)
        self._pieces = DevicePieces(self.blocks, lanes)
        on_host = HostBlocks(self._pieces)
        self.gather, self.scatter = on_host.gather, on_host.scatter

    def part_of(self, part: ArenaPart) -> "DeviceBuffer":
        """Its blocks are copied as a whole."""
        if part != WHOLE:
            raise HandoffRejected("its blocks are in a GPU's memory, which several ranks do not share")
        return self

    def begin_thread(self) -> None:
        self.lanes.accelerator.use()

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark blocks as written under a generation (0: no lease)."""
        self.generations[np.asarray(block_ids, np.int64)] = generation

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""
        return generation != NO_LEASE and bool((self.generations[np.asarray(block_ids, np.int64)] == generation).all())

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return self._pieces.pieces_to_read(block_ids)

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return self._pieces.pieces_to_write(block_ids)

    def listed(self, block_ids: BlockIds) -> None:
        """Return None: the blocks are on a device."""

    def exported(self) -> DeviceMemoryHandle:
        """Each call is for one other process."""
        return DeviceMemoryHandle(*self.lanes.accelerator.exported(self.blocks))

"""Speed of a device's blocks to another process and back, against a plain copy of as many bytes between the devices.

The other process owns blocks as a prefill worker on a GPU does its candidate buffer; here is the worker that evicts
into it (offload) and lets requests in from it (fetch), checksums included.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import PeerLost
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.device.accelerator import Accelerator, accelerator_of, synchronize
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.kv_transfer import KVTransfer
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, DeviceBuffer, IpcTransfer
from benchmarks.measuring.results import TransferResult
from benchmarks.transfer.block_moves import BlockMoves
from benchmarks.transfer.spec import TransferBenchmarkSpec
from lab.gpu_check.host_accelerator import HostAccelerator

END = "end"
_SECRET = bytes(32)  # of two processes that live for this measurement
_BEGINS_WITHIN_S = 120.0  # with PyTorch to be loaded, on a device that is slow to begin


@contextmanager
def peer_process(serve: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `serve(connection, *arguments)` in a process; it says when it is ready, and returns at END. Raises
    PeerLost when it does not begin."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        _await_ready(here)
        yield here
    finally:
        with suppress(OSError):
            here.send(END)
        process.join(10)
        process.kill()
        process.join()
        here.close()


def _await_ready(here: Connection) -> None:
    if not here.poll(_BEGINS_WITHIN_S):
        raise PeerLost("the other process does not begin")
    try:
        here.recv()
    except EOFError as error:
        raise PeerLost("the other process ended as it began; what it printed says why") from error


def identity(role: Role) -> Identity:
    """Return the identity of one of the two processes."""
    return Identity(role, role.value, _SECRET, 30.0)


def address(folder: Path) -> str:
    return f"unix:{folder}/blocks.sock"


CUDA_IPC = "cuda_ipc"


class PeerWay(NamedTuple):
    """A transport, and where the blocks of both processes are."""

    transport: str
    here: str
    there: str


def peer_rows(spec: TransferBenchmarkSpec, way: PeerWay) -> Iterator[TransferResult]:
    """Measure both directions of every size. Raises HandoffRejected or PeerLost where this way does not work."""
    for shape, num_blocks in spec.sizes():
        yield from _rows_of(BlockMoves(spec, shape, num_blocks), way)


def _rows_of(moves: BlockMoves, way: PeerWay) -> Iterator[TransferResult]:
    storage = BlockStorage(moves.layout, moves.num_blocks, way.here)
    storage.bytes.random_()
    synchronize(storage.device)
    served = (moves.layout, moves.num_blocks, way.there, way.transport)
    with (
        tempfile.TemporaryDirectory() as folder,
        peer_process(_serve_blocks, Path(folder), *served),
    ):
        transfer = _opened(way, storage, Path(folder))
        try:
            yield from _measured(moves, way, transfer)
        finally:
            transfer.close()
            del transfer  # with what is mapped here, before its owner ends


def _measured(moves: BlockMoves, way: PeerWay, transfer: KVTransfer) -> Iterator[TransferResult]:
    copy = moves.offload(transfer)
    here, there = (torch.zeros(moves.num_bytes, dtype=torch.uint8, device=device) for device in (way.here, way.there))
    yield moves.result(way.transport, "offload", lambda: moves.offload(transfer), _copying(there, here))
    yield moves.result(way.transport, "fetch", lambda: moves.fetch(transfer, copy), _copying(here, there))


def _opened(way: PeerWay, storage: BlockStorage, folder: Path) -> KVTransfer:
    own = identity(Role.DECODE_WORKER)
    if way.transport == CUDA_IPC:
        return IpcTransfer(storage, address(folder), identity=own, lanes=_lanes(storage.accelerator))
    return ChannelTransfer(storage, address(folder), identity=own, transport=way.transport)


def _lanes(accelerator: Accelerator | None) -> CopyLanes:
    return CopyLanes(accelerator or HostAccelerator())


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)
        for tensor in (source, target):
            synchronize(tensor.device)

    return copy


def _serve_blocks(
    connection: Connection, folder: Path, layout: BlockLayout, num_blocks: int, device: str, transport: str
) -> None:
    lanes = _lanes(accelerator_of(torch.device(device)))
    buffer = DeviceBuffer(layout, lanes.accelerator.lendable(num_blocks, layout.block_bytes), lanes)
    server = BlockServer(
        buffer,
        address(folder),
        identity=identity(Role.PREFILL_WORKER),
        transports=(transport,),
        open_channel=open_channel,
    )
    connection.send("ready")
    while connection.recv() != END:
        pass
    server.close()

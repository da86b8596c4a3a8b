"""Speed of block transfers over TCP, in clear and encrypted, against a bare stream of the same kind and bytes.

Both ends run on this machine, over its loopback: what the network would take is not in either of them.
"""

import socket
import ssl
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer
from benchmarks.measuring.results import TransferResult
from benchmarks.transfer.block_moves import BlockMoves
from benchmarks.transfer.peer_process import END, identity, memory_folder, peer_process
from benchmarks.transfer.spec import TransferBenchmarkSpec

_KINDS = ("tcp", "tls")
_SEND, _RECEIVE = "send", "receive"


def stream_rows(spec: TransferBenchmarkSpec) -> Iterator[TransferResult]:
    torch.set_num_threads(1)
    for shape, num_blocks in spec.sizes():
        moves = BlockMoves(spec, shape, num_blocks)
        for kind in _KINDS:
            with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
                yield from _rows(moves, kind, Path(folder))


def _rows(moves: BlockMoves, kind: str, folder: Path) -> Iterator[TransferResult]:
    authority = CertificateAuthority.new("benchmark")
    here, there = (identity(role, authority) for role in (Role.DECODE_WORKER, Role.PREFILL_WORKER))
    storage = BlockStorage(moves.layout, moves.num_blocks)
    with peer_process(_serve, folder, moves.layout, moves.num_blocks, kind, there) as connection:
        address, port = connection.recv()
        transfer = ChannelTransfer(storage, address, identity=here, transport="tcp")
        stream = _secured(socket.create_connection(("127.0.0.1", port)), kind, here, is_listener=False)
        flat = memoryview(bytearray(moves.num_bytes))
        copy = moves.offload(transfer)

        def send() -> None:
            connection.send(_RECEIVE)
            stream.sendall(flat)
            connection.recv()

        def receive() -> None:
            connection.send(_SEND)
            _receive_all(stream, flat)
            connection.recv()

        yield moves.result(kind, "offload", lambda: moves.offload(transfer), send)
        yield moves.result(kind, "fetch", lambda: moves.fetch(transfer, copy), receive)
        transfer.close()
        stream.close()


def _serve(
    connection: Connection, folder: Path, layout: BlockLayout, num_blocks: int, kind: str, own: Identity
) -> None:
    torch.set_num_threads(1)
    arena = Arena.create(folder / "candidates.arena", layout, num_blocks)
    server = BlockServer(ArenaBuffer(arena), f"{kind}:127.0.0.1:0", identity=own, transports=("tcp",))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection.send("ready")
        connection.send((server.address, listener.getsockname()[1]))
        stream = _secured(listener.accept()[0], kind, own, is_listener=True)
        flat = memoryview(bytearray(num_blocks * layout.block_bytes))
        while (said := connection.recv()) != END:
            if said == _SEND:
                stream.sendall(flat)
            else:
                _receive_all(stream, flat)
            connection.send("done")
        stream.close()
    server.close()
    arena.close(unlink=True)


def _secured(stream: socket.socket, kind: str, own: Identity, *, is_listener: bool) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tcp":
        return stream
    credentials = own.trusted()
    context: ssl.SSLContext = credentials.listener_context() if is_listener else credentials.dialler_context()
    return context.wrap_socket(stream, server_side=is_listener)


def _receive_all(stream: socket.socket, content: memoryview) -> None:
    received = 0
    while received < len(content):
        received += stream.recv_into(content[received:])

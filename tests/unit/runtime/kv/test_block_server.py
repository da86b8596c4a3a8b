"""The server of blocks when its process has too many open files, and when strangers come."""

import contextlib
import logging
import resource
import socket
import time
from pathlib import Path

import pytest

from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer


def test_connections_are_accepted_again_when_files_can_be_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    arena = Arena.create(tmp_path / "arena", BlockLayout(16, 1, 1, 4, "float16"), 4)
    identity = Identity(Role.KV_POOL, "pool-0", b"secret", 5.0)
    server = BlockServer(ArenaBuffer(arena), f"unix:{tmp_path}/blocks.sock", identity=identity, transports=("tcp",))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The first may still get the file that a waiting `accept` has reserved, and nothing more.
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        second.settimeout(5.0)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            first.connect(f"{tmp_path}/blocks.sock")
            ends_s = time.monotonic() + 5.0
            while "Too many open files" not in caplog.text and time.monotonic() < ends_s:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "Too many open files" in caplog.text
        second.connect(f"{tmp_path}/blocks.sock")
        assert second.recv(1)  # the first byte of the challenge
    server.close()
    arena.close(unlink=True)


def test_strangers_write_one_line_however_often_they_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    arena = Arena.create(tmp_path / "arena", BlockLayout(16, 1, 1, 4, "float16"), 4)
    identity = Identity(Role.KV_POOL, "pool-0", b"secret", 5.0)
    server = BlockServer(ArenaBuffer(arena), f"unix:{tmp_path}/blocks.sock", identity=identity, transports=("tcp",))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5.0)
            stranger.connect(f"{tmp_path}/blocks.sock")
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # until it is refused
                    pass
    server.close()
    arena.close(unlink=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a handshake failed" in line

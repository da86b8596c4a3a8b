"""Another process that serves blocks while a benchmark moves them."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from alignedserve.core.errors import PeerLost
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity

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

"""Running a room in a process: an event loop in a thread of its own, and a clear end when something breaks.

A room that breaks takes its process with it: whoever supervises the process (Ray, or a test) starts a clean one, which
is simpler to reason about than a room that goes on after a broken invariant.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import uvloop

logger = logging.getLogger(__name__)

_EXIT_BROKEN = 70  # EX_SOFTWARE


class Hosted(Protocol):
    """What runs on the loop."""

    async def close(self) -> None:
        """Give everything back."""


class RoomThread:
    """One event loop in a daemon thread. `start` builds the room on it and returns when it is up, or raises."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._on_unhandled)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._room: Hosted | None = None

    def start(self, build: Callable[[], Awaitable[Hosted]], timeout_s: float = 120.0) -> None:
        """Run `build` on the loop. Whatever it raises is raised here."""
        self._thread.start()
        self._room = self._call(build).result(timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the room; the process may end afterwards. May be repeated."""
        room, self._room = self._room, None
        if room is not None:
            self._call(room.close).result(timeout_s)

    def _call(self, make: Callable[[], Awaitable[Any]]) -> "Future[Any]":
        async def run() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):  # a peer that went away while we wrote: its link says so too
            logger.debug("%s: %s", self._name, context.get("message"))
            return
        logger.critical("%s is broken and ends: %s", self._name, context.get("message"), exc_info=error)
        logging.shutdown()
        os._exit(_EXIT_BROKEN)


def log_to_file(folder: Path, name: str) -> None:
    """Send this process's log to `folder/name.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=folder / f"{name}.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )

"""Hosting a service in a process: an event loop in its own thread, and a clear end when something breaks.

A service that breaks ends its process: the supervisor (Ray, or a test) starts a clean one, which is simpler to reason
about than a service that continues after a broken invariant.
"""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar

import psutil
import uvloop

from alignedserve.core.errors import AlignedServeError
from alignedserve.messages.handshake import Role
from alignedserve.process.heap import settle_heap
from alignedserve.process.loading_progress import read_progress
from alignedserve.process.logs import LogFileHandler, QueuedLogHandler
from alignedserve.process.process_spec import ProcessSpec

logger = logging.getLogger(__name__)

_EXIT_BROKEN = 70  # EX_SOFTWARE
_STALL_S = 600.0  # without progress, a start has failed
_STOP_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 10.0

ResultT = TypeVar("ResultT")


class HostedService(Protocol):
    """A service that runs on the loop."""

    async def close(self) -> None:
        """Release all resources."""


class ActorHost:
    """Runs a process's service on an event loop in a daemon thread. Base of the Ray actors, usable without Ray. Once it
    is up, the process's heap is settled: no collection looks at what the start has made. A known error
    (AlignedServeError) while building does not raise: it is kept, so that the creator of the process can read it by
    `failure`. Any other error ends the process."""

    def __new__(cls, *_: object, **__: object) -> Self:
        gc.disable()
        return super().__new__(cls)

    def __init__(self, process_spec: ProcessSpec, build: Callable[[], Coroutine[Any, Any, HostedService]]) -> None:
        self._name = process_spec.name
        _log_to_file(process_spec)
        self._failure: AlignedServeError | None = None
        self._service: HostedService | None = None
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._on_unhandled)
        threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        try:
            self._service = _result(asyncio.run_coroutine_threadsafe(build(), self._loop), process_spec)
        except AlignedServeError as error:
            logger.exception("%s cannot start", self._name)
            self._failure = error
        except Exception:
            logger.critical("%s is broken and does not start", self._name, exc_info=True)
            raise
        finally:
            settle_heap()

    def failure(self) -> AlignedServeError | None:
        """Return why the service could not start; None when it is up."""
        return self._failure

    def memory_bytes(self) -> int:
        """Return the memory of this process. Shared pages are divided among their processes, where the system tells."""
        memory = psutil.Process().memory_full_info()
        return int(getattr(memory, "pss", memory.rss))

    def stop(self) -> None:
        """Close the service; the process may end afterwards. May be repeated."""
        service, self._service = self._service, None
        if service is not None:
            asyncio.run_coroutine_threadsafe(service.close(), self._loop).result(_STOP_TIMEOUT_S)
            for handler in logging.getLogger().handlers:
                handler.flush()

    def call(self, answer: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine of the service on its loop, from any thread. Raises what it raises, or TimeoutError."""
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result(_CALL_TIMEOUT_S)

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):  # a lost peer, which its link reports
            logger.debug("%s: %s", self._name, context.get("message"))
            return
        logger.critical("%s is broken and ends: %s", self._name, context.get("message"), exc_info=error)
        logging.shutdown()
        os._exit(_EXIT_BROKEN)


def _result(built: "Future[HostedService]", process_spec: ProcessSpec) -> HostedService:
    path, known = process_spec.progress_path(), None
    while True:
        try:
            return built.result(_STALL_S)
        except TimeoutError:
            progress = read_progress(path)
            if built.done() or progress == known:
                raise
            known = progress


def _log_to_file(process_spec: ProcessSpec) -> None:
    folder = process_spec.log_folder
    folder.mkdir(parents=True, exist_ok=True)
    # A gateway's loop serves all streams, and logs what strangers send: it never waits for the disk.
    make = QueuedLogHandler if process_spec.role is Role.GATEWAY else LogFileHandler
    handler = make(folder / f"{process_spec.name}.log", process_spec.log_format)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)

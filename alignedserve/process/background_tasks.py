"""Runs tasks that nobody awaits, or whose waiter may leave before they end.

An unread error ends a hosted process; each function here says who reads its error.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def start_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run the coroutine until it is cancelled. The caller keeps the task: the loop holds it only weakly."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def outlived(work: asyncio.Future[T]) -> T:
    """Wait for work that goes on when the waiter is cancelled, and whose error is then dropped. `asyncio.shield` alone
    leaves such an error unread, and the loop reports that when the future is collected."""
    work.add_done_callback(_read)
    return await asyncio.shield(work)


class PatientReader(Generic[T]):
    """Reads one value at a time, for callers that come again and again and can only wait a moment. A source that hangs
    is asked once, however many callers come meanwhile."""

    def __init__(self, patience_s: float) -> None:
        """Make a reader; `patience_s`: for which a caller waits."""
        self._patience_s = patience_s
        self._reading: asyncio.Future[T] | None = None

    async def read(self, start: Callable[[], asyncio.Future[T]]) -> T | None:
        """Return what the reading under way, or else a new one, yields in time; None: nothing yet. Raises what the
        reading raises."""
        reading = self._reading
        if reading is None:
            reading = self._reading = start()
        await asyncio.wait({reading}, timeout=self._patience_s)
        if not reading.done():
            return None
        if self._reading is reading:
            self._reading = None
        return reading.result()


def _read(work: asyncio.Future[T]) -> None:
    if not work.cancelled():
        work.exception()


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)

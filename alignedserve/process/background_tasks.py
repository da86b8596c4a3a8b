"""Tasks that nobody awaits, or that their waiter may leave: errors that nobody hears end a hosted process."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run the coroutine until it is cancelled. The caller keeps the task: the loop holds it only weakly."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def outlived(work: asyncio.Future[T]) -> T:
    """Wait for work that goes on where its waiter is cancelled: its error then concerns nobody.

    `asyncio.shield` alone leaves such an error unread, and the loop reports that when the future is collected.
    """
    work.add_done_callback(_read)
    return await asyncio.shield(work)


def _read(work: asyncio.Future[T]) -> None:
    if not work.cancelled():
        work.exception()


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)

"""Tasks that are not awaited: their errors go to the loop's exception handler, which ends a hosted process."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def start_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run the coroutine until it is cancelled. The caller keeps the task: the loop holds it only weakly."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)

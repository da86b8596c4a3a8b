"""A background task that breaks is heard of; one that is cancelled is not."""

import asyncio
import contextlib
import gc
from typing import Any

from alignedserve.process.background_tasks import outlived, start_background


async def test_a_broken_task_reaches_the_loop() -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))

    async def breaks() -> None:
        raise ZeroDivisionError

    start_background(breaks(), "the division")
    endless = start_background(asyncio.sleep(60), "the wait")
    await asyncio.sleep(0)
    endless.cancel()
    await asyncio.sleep(0.01)
    assert [context["message"] for context in heard] == ["the division failed"]
    assert isinstance(heard[0]["exception"], ZeroDivisionError)


async def test_the_error_of_work_whose_waiter_is_gone_ends_nothing() -> None:
    """A cancelled line of a batch, whose grammar then failed, ended the process some time later."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(outlived(work))
    await asyncio.sleep(0)
    waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiter
    work.set_exception(ZeroDivisionError())
    await asyncio.sleep(0)
    del work, waiter
    gc.collect()
    assert heard == []

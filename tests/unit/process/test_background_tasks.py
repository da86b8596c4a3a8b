"""A background task that breaks is heard of; one that is cancelled is not."""

import asyncio
from typing import Any

from alignedserve.process.background_tasks import start_background


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

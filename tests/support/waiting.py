"""Waiting for what happens on this event loop."""

import asyncio
from collections.abc import Callable


async def holds(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until it does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (it is about several objects, none of which has an event for it)
            await asyncio.sleep(0.001)

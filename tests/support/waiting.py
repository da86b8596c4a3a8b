"""Waiting for what happens on this event loop."""

import asyncio
from collections.abc import Awaitable, Callable


async def holds(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until it does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (it is about several objects, none of which has an event for it)
            await asyncio.sleep(0.001)


async def holds_async(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until it does, where asking takes time itself."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.01)

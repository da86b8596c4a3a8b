"""Waiting for what happens on this event loop, or in other processes."""

import asyncio
import time
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


def wait_until(
    condition: Callable[[], bool], timeout_s: float, seen: Callable[[], object], poll_s: float = 1.0
) -> None:
    """Block until it holds; fail with `seen` where it does not come to."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, seen()
        time.sleep(poll_s)

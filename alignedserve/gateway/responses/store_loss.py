"""Outlasts the loss of a store: the process that keeps it is started again within seconds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from alignedserve.core.errors import StoreFull, StoreUnavailable

ResultT = TypeVar("ResultT")

_RETURNS_S = 60.0  # as a router's next one
_PAUSE_S = 0.2


class StoreLoss:
    """A store that may be away. Calls that may be repeated are, until it has been away for too long.

    One whose disk is full is there, and says so to the client: nobody knows when that ends.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # None: it is there

    def is_over(self) -> None:
        self._since_s = None

    async def wait(self, error: StoreUnavailable) -> None:
        """Pause before the next attempt. Raises the error of the last one after too many, and that of a full disk."""
        if isinstance(error, StoreFull):
            raise error
        now = asyncio.get_running_loop().time()
        self._since_s = now if self._since_s is None else self._since_s
        if now - self._since_s >= _RETURNS_S:
            raise error
        await asyncio.sleep(_PAUSE_S)


async def outlast(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Return what a call returns that may be repeated, once the store is there. Raises StoreUnavailable after long."""
    loss = StoreLoss()
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            await loss.wait(error)

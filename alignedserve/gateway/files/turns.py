"""Changes that are made one at a time for each owner: at once they would see each other's, and begin anew."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from alignedserve.core.errors import StoreUnavailable

_LONG_S = 0.5  # what fails sooner holds up nobody: others of many gateways were in its way


class _Owner:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_given_up = 0  # changes that the store did not answer to


class Turns:
    """The changes of this process that wait, by their owners; other processes' are seen by the store alone."""

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[str, _Owner] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Let one change of this owner be made. Raises StoreUnavailable if the store did not answer to one before it.

        So all that wait fail with it, and not one after the other, each after seconds.
        """
        owner = self._owners.setdefault(name, _Owner())
        num_given_up = owner.num_given_up
        async with owner.lock:
            if owner.num_given_up != num_given_up:
                raise StoreUnavailable("Files and batches cannot be reached now.")
            began_s = time.monotonic()
            try:
                yield
            except StoreUnavailable:
                owner.num_given_up += time.monotonic() - began_s >= _LONG_S
                raise

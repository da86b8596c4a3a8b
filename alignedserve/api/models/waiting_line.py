"""Requests to models that sleep: each waits here until its model has been loaded, or its patience is over."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alignedserve.api.errors import Overloaded, Unavailable


class WaitingLine:
    """The requests of one process that wait, by the names of their models. All methods run on one loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: requests that may wait at a time."""
        self._most = most
        self._clock = clock
        self._since: dict[str, list[float]] = {}
        self._changed = asyncio.Event()

    def waited_s(self, name: str) -> float | None:
        """Return how long the first request to a model has waited; None: none waits."""
        since = self._since.get(name)
        return self._clock() - min(since) if since else None

    def changed(self) -> None:
        """Let those who wait look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, name: str, problem: Callable[[], str | None], patience_s: float) -> None:
        """Return once the model is no more asleep.

        `problem`: returns None then, and an empty text while it sleeps; any other text is why it cannot be loaded.
        Raises Unavailable with that, or when the patience is over, and Overloaded where too many wait.
        """
        with self._waiting(name):
            try:
                async with asyncio.timeout(patience_s):
                    while (found := problem()) is not None:
                        if found:
                            raise Unavailable(f"The model cannot be loaded at present: {found}")
                        await self._changed.wait()
            except TimeoutError as error:
                message = f"The model could not be loaded within {patience_s:.0f} s: others are in use."
                raise Unavailable(message) from error

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        if sum(map(len, self._since.values())) >= self._most:
            raise Overloaded("Too many requests wait for models to be loaded.", retry_after_s=5.0)
        since = self._clock()
        self._since.setdefault(name, []).append(since)
        try:
            yield
        finally:
            self._since[name].remove(since)
            if not self._since[name]:
                del self._since[name]

"""Requests to models that sleep: each waits here until its model has been loaded, or its patience is over."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alignedserve.api.errors import Overloaded, ResourceUnavailable, Unavailable
from alignedserve.core.request import RequestClass

_RETRY_S = 5.0


class WaitingLine:
    """The requests of one process that wait, by the names of their models. All methods run on one loop.

    Each class has places of its own: documents that wait, however many, take none of chat's.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._num_waiting = Counter[RequestClass]()
        self._since: dict[tuple[str, RequestClass], list[float]] = {}
        self._changed = asyncio.Event()

    def waited_s(self, name: str, request_class: RequestClass) -> float | None:
        """Return how long the first request of a class to a model has waited; None: none waits."""
        since = self._since.get((name, request_class))
        return self._clock() - min(since) if since else None

    def changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(
        self, name: str, request_class: RequestClass, problem: Callable[[], str | None], patience_s: float
    ) -> None:
        """Return once the model is no more asleep.

        `problem`: returns None then, and an empty text while it sleeps; any other text is why it cannot be loaded.
        Raises Unavailable with that, or when the patience is over; where too many of its class wait, Overloaded or
        ResourceUnavailable.
        """
        with self._waiting(name, request_class):
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
    def _waiting(self, name: str, request_class: RequestClass) -> Iterator[None]:
        if self._num_waiting[request_class] >= self._most:
            kind = ResourceUnavailable if request_class is RequestClass.BEST_EFFORT else Overloaded
            raise kind("Too many requests wait for models to be loaded.", retry_after_s=_RETRY_S)
        since, place = self._clock(), (name, request_class)
        self._since.setdefault(place, []).append(since)
        self._num_waiting[request_class] += 1
        try:
            yield
        finally:
            self._num_waiting[request_class] -= 1
            self._since[place].remove(since)
            if not self._since[place]:
                del self._since[place]

"""The lanes of a device's copies: a stream and staging memory each, as many as copies were ever under way at once.

PyTorch hands out 32 streams in turn. With a stream for each copy, copies would soon share the computing stream and wait
for it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.kv.copies.direct_copies import DirectCopies

T = TypeVar("T")


class Lanes(Generic[T]):
    """Lanes of one kind, made by need and used again. From any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._free: deque[T] = deque()

    @contextlib.contextmanager
    def taken(self) -> Iterator[T]:
        """Yield a lane that nothing else uses meanwhile; its work must be done at the end."""
        try:
            lane = self._free.pop()
        except IndexError:
            lane = self._make()
        try:
            yield lane
        finally:
            self._free.append(lane)


class CopyLanes:
    """The lanes of one device for direct copies."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._direct = Lanes(lambda: DirectCopies(accelerator))

    def direct(self) -> contextlib.AbstractContextManager[DirectCopies]:
        """Take a lane for the body. The calling thread has the device as its current one from then on."""
        self.accelerator.use()
        return self._direct.taken()

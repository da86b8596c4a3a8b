"""Host memory that is registered with a GPU's driver, so that the GPU copies straight to and from it.

Memory of another process's making, such as an arena, cannot be allocated page-locked; it can be registered later, which
takes about a tenth of a second for each GiB. One registration is limited, so large memory is registered in chunks.

Nothing here loads torch: the KV pool, whose arena it is, does without it.
"""

from typing import Protocol

_CHUNK_BYTES = 64 << 30


class MemoryDriver(Protocol):
    """The two calls of a driver."""

    def register(self, address: int, size: int) -> str | None:
        """Register memory; return why it cannot be, None when it is."""

    def unregister(self, address: int) -> None:
        """Undo the registration that begins at this address."""


class RegisteredMemory:
    """Memory registered from construction until `close`, all of it or, with the `obstacle`, nothing.

    It is to be closed before the memory is unmapped.
    """

    def __init__(self, driver: MemoryDriver, address: int, size: int, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.obstacle: str | None = None
        self._driver = driver
        self._chunks: list[int] = []
        for first in range(0, size, chunk_bytes):
            self.obstacle = driver.register(address + first, min(chunk_bytes, size - first))
            if self.obstacle is not None:
                self.close()
                return
            self._chunks.append(address + first)

    def close(self) -> None:
        """Undo the registration. May be repeated; no copy may be under way."""
        while self._chunks:
            self._driver.unregister(self._chunks.pop())

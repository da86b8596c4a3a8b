"""Host memory that is registered with a GPU's driver, so that the GPU copies straight to and from it.

Memory of another process's making, such as an arena, cannot be allocated page-locked; it can be registered later, which
takes about a tenth of a second for each GiB. One registration is limited (drivers from 580 on refuse 512 GiB), so large
memory is registered in chunks. A copy that reaches over two of them is refused as an invalid argument, so chunks are
cut between rows, and whoever copies neighbours splits them there.

Nothing here loads torch: the KV pool, whose arena it is, does without it."""

import math
import mmap
from typing import Protocol

CHUNK_BYTES = 64 << 30


class MemoryDriver(Protocol):
    """The two calls of a driver."""

    def register(self, address: int, size: int) -> str | None:
        """Register memory; return why it cannot be, None when it is."""

    def unregister(self, address: int) -> None:
        """Undo the registration that begins at this address."""


class RegisteredMemory:
    """Rows registered from construction until `close`, all of them or, with the `obstacle`, none. It is to be closed
    before the memory is unmapped."""

    def __init__(
        self,
        driver: MemoryDriver,
        address: int,
        row_bytes: int,
        num_rows: int,
        *,
        head_bytes: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`head_bytes`: in front of the first row, which begins a page; registered with it."""
        assert (address + head_bytes) % mmap.PAGESIZE == 0, "rows that begin a page"
        self.obstacle: str | None = None
        together = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)
        self.rows_per_chunk = max(1, chunk_bytes // row_bytes // together) * together
        self._driver = driver
        self._chunks: list[int] = []
        end = address + head_bytes + num_rows * row_bytes
        while address < end:
            step = self.rows_per_chunk * row_bytes + (0 if self._chunks else head_bytes)
            self.obstacle = driver.register(address, min(step, end - address))
            if self.obstacle is not None:
                self.close()
                return
            self._chunks.append(address)
            address += step

    def close(self) -> None:
        """Undo the registration. May be repeated; no copy may be under way."""
        while self._chunks:
            self._driver.unregister(self._chunks.pop())

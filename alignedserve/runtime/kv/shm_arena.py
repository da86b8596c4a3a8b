"""Arenas: blocks in shared memory, mapped by their owner and by the workers of its node.

The pool of a node owns one, and a prefill worker one for each decode worker, as its candidate buffer.

File layout: one header page (magic, layout digest, counts), the table of generations (8 bytes a block), the blocks.
The pool stamps a block with the generation of its lease when it leases it and with 0 when it takes it back; in a
candidate buffer the writer that the owner assigned stamps it before writing. Either way a reader that finds the
expected generation before and after its copy has read what the lease's writer wrote."""

import ctypes
import errno
import fcntl
import logging
import os
import platform
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, NotEnoughMemory
from alignedserve.runtime.device.memory_maps import map_file, take_pages
from alignedserve.runtime.device.registered_memory import CHUNK_BYTES, MemoryDriver, RegisteredMemory
from alignedserve.runtime.kv.block_runs import BlockIds
from kernels.cpu.block_copies import BlockList

logger = logging.getLogger(__name__)

_MAGIC = b"ALSVKV01"
_HEADER = struct.Struct("<8s32sQQ")
_PAGE = 4096
_MIB = 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POOL_PURPOSE, POOL_SETTING = "the KV pool", "pool.memory_bytes"
NO_LEASE = 0  # generation of blocks that no lease holds


class ArenaPart(NamedTuple):
    """The part of every block that one rank of a worker copies: part `rank` of `size` equal ones, one after another."""

    rank: int = 0
    size: int = 1

    def whole(self, layout: BlockLayout) -> BlockLayout:
        """Return the layout of whole blocks; `layout`: of the part."""
        return replace(layout, num_layers=layout.num_layers * self.size)

    def of(self, layout: BlockLayout) -> BlockLayout:
        """Return the layout of the part; `layout`: of whole blocks. Raises HandoffRejected if there is no such part."""
        if not 0 <= self.rank < self.size or layout.num_layers % self.size:
            raise HandoffRejected(f"the arena's blocks have no part {self.rank} of {self.size}")
        return replace(layout, num_layers=layout.num_layers // self.size)


WHOLE = ArenaPart()


class Arena:
    """One mapping of the shared blocks. `blocks` is uint8 [num_blocks, block_bytes]; `generations` uint64 [num_blocks].
    Created by its owner, attached by others. The creator holds the file's lock until its process ends, which
    distinguishes a file in use from one that a killed run left behind. The memory of an unlinked file is freed when the
    last arena that maps it is closed or garbage-collected."""

    def __init__(
        self, path: Path, file_descriptor: int, num_blocks: int, layout: BlockLayout, part: ArenaPart = WHOLE
    ) -> None:
        """Take over the descriptor: the mapping keeps the file and its lock.

        `layout`: of whole blocks; `part`: of a block that is copied here, whose layout is the arena's from then on."""
        self.path = path
        self.file_id = _identify(file_descriptor)  # differs for another file at the same path
        self.layout = part.of(layout)
        block_bytes = layout.block_bytes
        try:
            content = map_file(file_descriptor, _file_bytes(num_blocks, block_bytes))
        finally:
            os.close(file_descriptor)
        self._address = ctypes.addressof(content)
        self._registered: RegisteredMemory | None = None
        self._collapsing: tuple[list[Any], threading.Thread | None] = [], None  # a mapping, which it drops in the end
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(content, np.uint64, num_blocks, _PAGE)
        start = _blocks_offset(num_blocks)
        flat = np.frombuffer(content, np.uint8, num_blocks * block_bytes, start)
        self.blocks: npt.NDArray[np.uint8] = flat.reshape(num_blocks, block_bytes)
        self._part = part

    @classmethod
    def create(
        cls,
        path: Path,
        layout: BlockLayout,
        num_blocks: int,
        *,
        purpose: str = POOL_PURPOSE,
        setting: str = POOL_SETTING,
    ) -> "Arena":
        """Create a new file, replacing any old one, with its memory allocated; huge pages follow (`take_pages`). Raises
        NotEnoughMemory, which names the purpose of the memory and the setting to lower."""
        path.unlink(missing_ok=True)
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        size = _file_bytes(num_blocks, layout.block_bytes)
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if size > _free_bytes(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(file_descriptor, size)
            mapped = [map_file(file_descriptor, size)]

            def note(num_huge: int) -> None:
                mapped.clear()
                logger.info("%s: %.0f of %.0f MiB on huge pages", path.name, num_huge / _MIB, size / _MIB)

            collapsing = take_pages(file_descriptor, lambda: next(iter(mapped), None), size, note)
            header = _HEADER.pack(_MAGIC, layout.digest(), num_blocks, layout.block_bytes)
            os.pwrite(file_descriptor, header, 0)
        except OSError as error:
            os.close(file_descriptor)
            path.unlink(missing_ok=True)
            raise NotEnoughMemory(_shortage(path, size, purpose, setting)) from error
        arena = cls(path, file_descriptor, num_blocks, layout)
        arena._collapsing = mapped, collapsing
        return arena

    @classmethod
    def attach(cls, path: Path, layout: BlockLayout, part: ArenaPart = WHOLE) -> "Arena":
        """Map an existing arena. Raises HandoffRejected when it is absent or does not have this layout.

        `part`: of each block that this process copies."""
        try:
            file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise HandoffRejected(f"no arena at {path}") from error
        header = os.pread(file_descriptor, _HEADER.size, 0)
        size = os.fstat(file_descriptor).st_size
        problem = _header_problem(header, size, layout)
        if problem is not None:
            os.close(file_descriptor)
            raise HandoffRejected(f"arena {path.name} refused: {problem}")
        return cls(path, file_descriptor, _HEADER.unpack(header)[2], layout, part)

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[0])

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark blocks as belonging to a lease (0: no lease)."""
        self.generations[np.asarray(block_ids, np.int64)] = generation

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of these blocks belong to this lease; free blocks belong to none."""
        return generation != NO_LEASE and bool((self.generations[np.asarray(block_ids, np.int64)] == generation).all())

    def listed(self, block_ids: BlockIds, part: ArenaPart | None = None) -> BlockList:
        """Return a part of these blocks to be read or overwritten in place; None: the one that is copied here."""
        rank, size = part or self._part
        parts = self.blocks.reshape(self.num_blocks * size, -1)
        return BlockList(parts, np.asarray(block_ids, np.int64) * size + rank)

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks, as a BlockStorage does: over one."""
        return iter((self.listed(block_ids),))

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks to overwrite in place, as a BlockStorage does: over one."""
        return iter((self.listed(block_ids),))

    @property
    def is_registered(self) -> bool:
        """Return whether a driver copies straight to and from the blocks."""
        return self._registered is not None

    @property
    def rows_per_registration(self) -> int:
        """Return how many rows of `listed` each registration has: no copy may reach over two."""
        assert self._registered is not None, "an arena that is registered"
        return self._registered.rows_per_chunk * self._part.size

    def register(self, driver: MemoryDriver, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Register the blocks with a driver until the arena is closed, or log why that is impossible."""
        if self._registered is not None:
            return
        num_blocks, block_bytes = self.blocks.shape
        head_bytes = _blocks_offset(num_blocks)
        registered = RegisteredMemory(
            driver, self._address, block_bytes, num_blocks, head_bytes=head_bytes, chunk_bytes=chunk_bytes
        )
        if registered.obstacle is not None:
            logger.warning("%s is not registered with the GPU's driver: %s", self.path.name, registered.obstacle)
            return
        self._registered = registered
        # Before the memory is unmapped, also where the arena is dropped without being closed.
        weakref.finalize(self, registered.close).atexit = False

    def close(self, *, unlink: bool = False) -> None:
        """Unmap, with the last view of the blocks where some are still in use; the pool also removes the file."""
        if unlink:
            self.path.unlink(missing_ok=True)
        if self._registered is not None:
            self._registered.close()
        del self.blocks, self.generations
        mapped, collapsing = self._collapsing
        mapped.clear()
        if collapsing is not None:
            collapsing.join()


def _identify(file_descriptor: int) -> str:
    stats = os.fstat(file_descriptor)
    return f"{_boot_id()}/{stats.st_dev}/{stats.st_ino}"


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return f"{platform.node()}-{psutil.boot_time():.0f}"


def _blocks_offset(num_blocks: int) -> int:
    return _PAGE + -(-num_blocks * 8 // _PAGE) * _PAGE


def _file_bytes(num_blocks: int, block_bytes: int) -> int:
    return _blocks_offset(num_blocks) + num_blocks * block_bytes


def _header_problem(header: bytes, size: int, layout: BlockLayout) -> str | None:
    if len(header) < _HEADER.size:
        return "the header is cut short"
    magic, digest, num_blocks, block_bytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        return "not an arena of this version"
    if digest != layout.digest() or block_bytes != layout.block_bytes:
        return "its block layout is not this worker's"
    if num_blocks < 1:
        return "it has no blocks"
    if num_blocks > size or _file_bytes(num_blocks, block_bytes) > size:
        return "it is smaller than its header says"
    return None


def _free_bytes(path: Path) -> int:
    stats = os.statvfs(path.parent)
    return stats.f_bavail * stats.f_frsize


def _shortage(path: Path, size: int, purpose: str, setting: str) -> str:
    free = _free_bytes(path)
    return (
        f"{purpose} needs {size / _MIB:.0f} MiB in {path.parent}, where {free / _MIB:.0f} MiB are free; "
        f"set {setting} to at most {free // _MIB}MiB"
    )

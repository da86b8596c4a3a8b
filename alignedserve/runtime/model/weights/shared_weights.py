"""One copy of packed weights in the memory of several processes of a host: pages of a file in shared memory.

Each process loads its weights as always. Every packed weight that the file has already, byte for byte, is then mapped
from there in place of the own pages, which are freed; one that it lacks is added first. The mappings are private: a
process that wrote to its weights would have a copy of that page, and no other would see it. Addresses stay, so nothing
that uses a weight has to know."""

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
from pathlib import Path

import msgspec

from alignedserve.disk.durable import open_private
from alignedserve.runtime.device.memory_maps import MAP_FIXED, map_memory
from kernels.cpu.packed_linear import weight_memories
from kernels.cpu.unnamed_files import take_space

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024


class _Index(msgspec.Struct):
    inode: int  # of that file
    num_bytes: int = 0
    offsets: dict[str, int] = {}  # by digest


def share_weights(path: Path, folder: Path) -> int:
    """Share the packed weights of this process by a file in shared memory; return the shared bytes. `folder`:
    private, for the file's index. The process holds the file (see `remove_stale_arenas`). No thread may use the
    weights meanwhile."""
    index_path = folder / f"{path.stem}.index"
    with index_path.with_suffix(".lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one process after the other
        file = open_private(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_SH)
        index = _read_index(index_path, os.fstat(file).st_ino)
        shared = sum(_share(file, index, *memory) for memory in weight_memories())
        written = index_path.with_suffix(".index.new")
        written.write_bytes(msgspec.json.encode(index))
        written.replace(index_path)
    logger.info("%d MiB of weights are shared, in %s", shared // _MIB, path)
    return shared


def _share(file: int, index: _Index, address: int, num_bytes: int) -> int:
    weight = (ctypes.c_char * num_bytes).from_address(address)
    digest = hashlib.blake2b(weight, digest_size=32).hexdigest()
    offset = index.offsets.get(digest)
    if offset is None:
        offset = index.num_bytes
        if not _append(file, weight, offset):
            return 0
        index.offsets[digest], index.num_bytes = offset, offset + num_bytes
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
    try:
        map_memory(address, num_bytes, protection, flags, file, offset)
    except OSError as error:
        logger.warning("a weight cannot be shared: %s", error.strerror)
        return 0
    return num_bytes


def _append(file: int, weight: "ctypes.Array[ctypes.c_char]", offset: int) -> bool:
    num_bytes = ctypes.sizeof(weight)
    try:
        take_space(file, offset, num_bytes)  # else a page that has no room is a signal, not an error
        written = 0
        while written < num_bytes:
            written += os.pwrite(file, memoryview(weight)[written:], offset + written)
    except OSError as error:
        os.ftruncate(file, offset)
        logger.warning("weights are not shared: %s", error.strerror)
        return False
    return True


def _read_index(path: Path, inode: int) -> _Index:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _Index(inode, offsets={})
    return index if index.inode == inode else _Index(inode, offsets={})

"""Memory of this process that it does not need: what goes back to the system, and what is kept for the next pass. On
Linux; elsewhere nothing is done."""

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_READ_ALONE = ("r--p", "r-xp")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # in malloc.h
_KEPT_BYTES = 1 << 30
_OWN = re.compile(r"(?:Anonymous|Swap): +(\d+) kB")


def give_free_memory_back() -> None:
    """Give back what the C library keeps of freed memory: tens of megabytes after a start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries have none
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep what is freed from now on: the system clears each page that it gives anew.

    A pass over a prompt takes and frees the same megabytes layer by layer, and a tenth of its time and more went into
    clearing them. `give_free_memory_back` still gives back what is free then.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other libraries have none
    if set_option is None:
        return
    set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
    # Some releases take no more than 32 MiB.
    if not set_option(_MMAP_THRESHOLD, _KEPT_BYTES):
        set_option(_MMAP_THRESHOLD, 32 << 20)


def forget_pages_of_files() -> None:
    """Forget the pages of libraries that only their loading has touched: of PyTorch's some fifty megabytes.

    They stay in the system's cache, and come back from there once they are touched. Kept are those that this process
    has written, as relocations are, whatever is forbidden since.
    """
    if not _SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        for start, end in unwritten_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace")):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unwritten_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the addresses at which files are mapped for reading alone, without a page of this process's own."""
    found: dict[tuple[int, int], None] = {}
    place = 0, 0
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            place = int(mapping[1], 16), int(mapping[2], 16)
            if mapping[3] in _READ_ALONE and mapping[4].startswith("/"):
                found[place] = None
        elif (own := _OWN.match(line)) and int(own[1]):
            found.pop(place, None)
    return list(found)

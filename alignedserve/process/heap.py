"""This process's heap: what collections look at, what goes back to the system, and what is kept for the next pass.

Memory goes back and is kept on Linux; elsewhere that does nothing.
"""

import contextlib
import ctypes
import gc
import mmap
import re
from pathlib import Path

_YOUNG = 20_000  # objects more than there were before, at which the young ones are looked at; the interpreter's is 700
_OLDER = 20  # such looks before those that have survived are looked at again
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_READ_ALONE = ("r--p", "r-xp")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # in malloc.h
_KEPT_BYTES = 1 << 30
_OWN = re.compile(r"(?:Anonymous|Swap): +(\d+) kB")


def settle_heap() -> None:
    """Look at nothing that exists now in any later collection, and collect less often. To be called after the start.
    Without this a tenth of the router's time goes into looking at requests that are still queued, and at modules. A
    worker stops for 130 ms, a gateway for 80, whenever the objects of its start are looked at, a quarter of a million
    of torch, Ray and others. They are not looked at here either: that would delay the start, and loading a model leaves
    no cycles behind."""
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)
    gc.enable()
    give_free_memory_back()


def freeze_heap() -> None:
    """Look at nothing that exists now, as what loading has made, in any later collection; cycles among it are freed."""
    gc.collect()
    gc.freeze()


def give_free_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries have none
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep what is freed from now on: the system clears each page that it gives anew. A pass over a prompt takes and
    frees the same megabytes layer by layer, and a tenth of its time and more went into clearing them.
    `give_free_memory_back` still gives back what is free then."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other libraries have none
    if set_option is None:
        return
    set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
    # Some releases take no more than 32 MiB.
    if not set_option(_MMAP_THRESHOLD, _KEPT_BYTES):
        set_option(_MMAP_THRESHOLD, 32 << 20)


def forget_pages_of_files() -> None:
    """Forget the pages of libraries that only their loading has touched: of PyTorch's some fifty megabytes. They stay
    in the system's cache, and come back from there once they are touched. Pages with relocations or other writes of
    this process are kept."""
    if not _SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        for start, end in unwritten_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace")):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unwritten_mappings(smaps: str) -> list[tuple[int, int]]:
    mappings: dict[tuple[int, int], None] = {}
    span = 0, 0
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            span = int(mapping[1], 16), int(mapping[2], 16)
            if mapping[3] in _READ_ALONE and mapping[4].startswith("/"):
                mappings[span] = None
        elif (match := _OWN.match(line)) and int(match[1]):
            mappings.pop(span, None)
    return list(mappings)

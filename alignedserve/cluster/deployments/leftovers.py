"""Removal of the files that ended processes leave in their node's private folder and in shared memory."""

from collections.abc import Iterable
from pathlib import Path

from alignedserve.runtime.kv.arena_files import (
    ARENA_PREFIX,
    ARENA_SUFFIX,
    arena_folder,
    arena_path,
    remove_stale_arenas,
)


def remove_files(folder: Path, names: Iterable[str]) -> bool:
    """Remove sockets, reports of progress and arenas of processes of the node with this private folder.

    Returns whether no arena is held any more.
    """
    is_gone = True
    for name in names:
        for path in (folder / f"{name}.sock", folder / f"{name}.progress"):
            path.unlink(missing_ok=True)
        remove_stale_arenas(arena_folder(), f"{ARENA_PREFIX}{folder.name}-{name}")
        lent = arena_folder().glob(f"{ARENA_PREFIX}{folder.name}-{name}-*{ARENA_SUFFIX}")
        is_gone &= not arena_path(folder.name, name).exists() and not any(lent)
    return is_gone

"""The files of arenas: where they lie, and the removal of those whose owner is gone.

Needs nothing but the standard library, for the small process that sweeps a node."""

import fcntl
import os
import tempfile
from pathlib import Path

from alignedserve.core.errors import NotEnoughMemory

ARENA_PREFIX = "alignedserve-"
ARENA_SUFFIX = ".arena"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (a memory file system, files made with O_EXCL and mode 0600)


def arena_folder() -> Path:
    """Return the folder of arenas: the machine's memory file system; of temporary files where it has none (macOS).
    Files that processes map are shared memory there as well, but the system also writes them to a disk by and by."""
    if not _SHARED_MEMORY.is_dir():
        return Path(tempfile.gettempdir())
    if not os.access(_SHARED_MEMORY, os.W_OK):
        raise NotEnoughMemory(f"{_SHARED_MEMORY} is not writable; the KV pool keeps its blocks there")
    return _SHARED_MEMORY


def arena_path(cluster_id: str, name: str) -> Path:
    """Return the path of the arena of this name in this cluster."""
    return arena_folder() / f"{ARENA_PREFIX}{cluster_id}-{name}{ARENA_SUFFIX}"


def remove_stale_arenas(folder: Path, prefix: str) -> list[Path]:
    """Delete arena files whose owner is gone, its lock being free, and return their paths. Files in use stay."""
    removed = []
    for path in sorted(folder.glob(f"{prefix}*{ARENA_SUFFIX}")):
        try:
            file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(file_descriptor)
    return removed

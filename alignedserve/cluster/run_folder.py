"""The private folder of a cluster on one host: its sockets and logs, locked while the cluster runs."""

import fcntl
import os
import secrets
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from alignedserve.config.environment import RUN_DIR_VARIABLE, run_root
from alignedserve.core.errors import ResourceError
from alignedserve.process.addresses import AddressBook
from alignedserve.runtime.kv.arena_files import (
    ARENA_PREFIX,
    ARENA_SUFFIX,
    arena_folder,
    arena_path,
    remove_stale_arenas,
)

_KEPT_FOLDERS = 8  # of clusters that have ended, for their logs
_MAX_SOCKET_PATH = 107  # bytes; the system's limit
_LONGEST_NAME = "prefill-1023"


def make_run_folder(name: str | None = None) -> Path:
    """Create a private folder for sockets and logs, and remove those of old clusters. `name`: of the folder; drawn when
    None. Raises ResourceError saying what to set."""
    root = make_run_root()
    try:
        folder = root / (name or secrets.token_hex(4))
        if len(os.fsencode(AddressBook(folder).of(_LONGEST_NAME).removeprefix("unix:"))) > _MAX_SOCKET_PATH:
            raise ResourceError(f"{root} is too long a path for Unix sockets; set {RUN_DIR_VARIABLE} to a shorter one")
        folder.mkdir(mode=0o700, exist_ok=name is not None)
        # Locked until this process ends, however it ends: the folder is in use. Before others are removed, as a
        # restarted agent finds its own here, with the sockets of processes that live.
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)
        _remove_old_folders(root)
    except OSError as error:
        raise _unusable(root, error) from error
    return folder


def make_run_root() -> Path:
    """Create the folder of all run folders, unless it is there. Raises ResourceError when others can enter it."""
    root = run_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_closed(root, "sockets and logs")
    except OSError as error:
        raise _unusable(root, error) from error
    return root


def require_closed(folder: Path, content: str) -> None:
    """Raise ResourceError, with the command that helps, for a folder that others can enter; OSError."""
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise ResourceError(f"{folder} belongs to another user, and is to hold {content}: name a folder of yours")
    if status.st_mode & 0o077:
        raise ResourceError(
            f"{folder} is open to others (mode {status.st_mode & 0o777:o}), and is to hold {content}; close it: "
            f"chmod 700 {shlex.quote(str(folder))}"
        )


def _unusable(root: Path, error: OSError) -> ResourceError:
    problem = f"{root} cannot hold sockets and logs: {error.strerror}"
    return ResourceError(f"{problem}; set {RUN_DIR_VARIABLE} to another folder")


def _remove_old_folders(root: Path) -> None:
    """Remove all but the latest few folders of ended clusters, and the sockets of those few; their logs stay. Another
    cluster that starts at the same time does so too: what is gone meanwhile is passed over."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=_changed_s)
    for path in folders:
        try:
            file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for socket_path in path.glob("*.sock"):
                socket_path.unlink(missing_ok=True)
            if path not in folders[-_KEPT_FOLDERS:]:
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its cluster runs
        finally:
            os.close(file_descriptor)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def remove_files(folder: Path, names: Iterable[str]) -> bool:
    """Remove sockets, reports of progress and arenas of processes of the node with this private folder. Returns whether
    no arena is held any more."""
    is_gone = True
    for name in names:
        for path in (folder / f"{name}.sock", folder / f"{name}.progress"):
            path.unlink(missing_ok=True)
        remove_stale_arenas(arena_folder(), f"{ARENA_PREFIX}{folder.name}-{name}")
        lent = arena_folder().glob(f"{ARENA_PREFIX}{folder.name}-{name}-*{ARENA_SUFFIX}")
        is_gone &= not arena_path(folder.name, name).exists() and not any(lent)
    return is_gone

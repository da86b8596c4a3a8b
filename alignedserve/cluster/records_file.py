"""The file of records when a cluster starts: checked, or begun where nothing would be lost by that."""

import sqlite3
from pathlib import Path

from alignedserve.batches.stores.sqlite_file import begin_file, check_file
from alignedserve.core.errors import ResourceError


def prepare_records(path: Path, *, is_served: bool = False) -> None:
    """Check the file of records, or begin it. Raises ResourceError, with whatever was there left as it is.

    `is_served`: a process may have it open, alone, and opens it again where it is started anew; it is not checked then.
    """
    if path.exists():
        if not is_served:
            check_file(path)
        return
    if has_contents(path.parent):
        raise ResourceError(
            f"{path} is missing, and the files and results beside it would be removed without it: put it back, "
            "name the Redis that has their records, or set batches.folder to another folder"
        )
    try:
        begin_file(path)
    except sqlite3.Error as error:
        raise ResourceError(f"{path} cannot be made: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be made: {error.strerror}") from error


def has_contents(folder: Path) -> bool:
    kept = (*(folder / "files").glob("file-*"), *(folder / "results").glob("*.log"))
    return any(not one.name.endswith(".partial") for one in kept)

"""Reads in parts what a node has recorded: its agent does, for the driver."""

import contextlib
import re
import shutil
from pathlib import Path

from alignedserve.process.recording import SUFFIX

MAX_PART_BYTES = 64 * 1024  # as much as Ray answers without its object store
_NAME = re.compile(rf"[a-z]+(-\d+)?\.\d+{re.escape(SUFFIX)}")


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def parts_folder(private: Path) -> Path:
    return private / "recordings"


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each recording there; none, where there is no such folder."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if is_name(path.name)}
    return {}


def read_part(folder: Path, name: str, offset: int) -> bytes:
    if not is_name(name):
        return b""
    try:
        with open(folder / name, "rb") as file:
            file.seek(offset)
            return file.read(MAX_PART_BYTES)
    except FileNotFoundError:
        return b""


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)

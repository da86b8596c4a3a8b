"""The folder that a command writes to (`--output`), and the command that reports name."""

import shlex
import sys
import tempfile
from pathlib import Path

from alignedserve.core.errors import ConfigError


def make_folder(folder: Path) -> None:
    """Make the folder, and check that files can be written there. Raises ConfigError.

    To be called before anything runs, so that a failure costs nothing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be made: {error.strerror}") from error
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error.strerror}") from error


def write_file(path: Path, content: bytes) -> None:
    """Write one of the folder's files. Raises ConfigError."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error


def command_line() -> str:
    return shlex.join(["alignedserve", *sys.argv[1:]])

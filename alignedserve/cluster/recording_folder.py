"""Prepares the folder of a recorded run before its components start."""

import contextlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ConfigError
from alignedserve.process.recording import PART_FILE, RUN_FILE, SUFFIX, RunMetadata


def with_absolute_folder(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with the folder as it is seen from everywhere, unchanged if recording is off."""
    if config.recording.folder is None:
        return config
    return recording_into(config, Path(config.recording.folder).expanduser().absolute())


def recording_into(config: ClusterConfig, folder: Path) -> ClusterConfig:
    return msgspec.structs.replace(config, recording=msgspec.structs.replace(config.recording, folder=str(folder)))


def write_run_file(metadata: RunMetadata) -> None:
    """Create the run's folder, which its configuration names, with RUN_FILE. Raises ConfigError if the folder is not
    empty, as two runs in one folder cannot be told apart."""
    assert metadata.config.recording.folder is not None, "recording is off"
    folder = Path(metadata.config.recording.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"recording.folder {folder} is not empty")
        folder.chmod(0o700)
        descriptor = os.open(folder / RUN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(metadata))
    except OSError as error:
        raise ConfigError(f"recording.folder {folder} cannot be written: {error.strerror}") from error


def remove_unserved(folder: Path) -> None:
    """Remove the recordings of a start that failed, so that the next one finds the folder empty. Never raises. Nothing
    has been served then, and a later start would be refused for this folder instead of its own reason."""
    with contextlib.suppress(OSError):
        parts = [path.parent for path in folder.glob(f"*/{PART_FILE}")]
        for directory in (folder, *parts):
            for path in (directory / RUN_FILE, directory / PART_FILE, *directory.glob(f"*{SUFFIX}")):
                path.unlink(missing_ok=True)
        for part in parts:
            part.rmdir()


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

"""Reads RUN_FILE, the configuration of a recorded cluster and the blocks of its model, and PART_FILE of its nodes."""

from pathlib import Path

import msgspec

from alignedserve.core.errors import AlignedServeError, RecordingError
from alignedserve.process.recording import PART_FILE, RUN_FILE, VERSION, RecordedPart, RunMetadata


def read_run_metadata(folder: Path) -> RunMetadata:
    """Read the metadata of a recorded run. Raises RecordingError."""
    path = folder / RUN_FILE
    try:
        metadata = msgspec.json.decode(path.read_bytes(), type=RunMetadata)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, AlignedServeError) as error:
        raise RecordingError(f"{path} is damaged: {str(error)[:200]}") from error
    if metadata.version != VERSION:
        raise RecordingError(f"{path} has version {metadata.version} of the format; this is version {VERSION}")
    return metadata


def parts_in(folder: Path) -> list[Path]:
    """Return the folders of other nodes' parts of a run. Raises OSError."""
    return sorted(path for path in folder.iterdir() if (path / PART_FILE).is_file())


def read_part(folder: Path) -> RecordedPart | None:
    """Read which node recorded what lies in this folder; None: the first. Raises RecordingError."""
    path = folder / PART_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RecordedPart)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordingError(f"{path} is damaged: {str(error)[:200]}") from error

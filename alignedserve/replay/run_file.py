"""Reads RUN_FILE: the configuration of a recorded cluster and the blocks of its model."""

from pathlib import Path

import msgspec

from alignedserve.core.errors import AlignedServeError, RecordingError
from alignedserve.messages.recording import RUN_FILE, VERSION, RunMetadata


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

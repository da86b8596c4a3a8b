"""Recording of a logic's decisions while it runs."""

import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from alignedserve.config.sections import RecordingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.disk.durable import open_private
from alignedserve.messages.events import Ticked
from alignedserve.process.recording import CLOSED, FULL, SUFFIX, RecordEncoder

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 256 * 1024
_SECRET_BYTES = 32


class Recorder:
    """Writes decisions to a file. An error of the file ends the recording, never the process."""

    def __init__(self, file: BinaryIO, encoder: RecordEncoder, opening: bytes, max_bytes: int) -> None:
        self._file: BinaryIO | None = file
        self._encoder = encoder
        self._num_left = max_bytes
        self._pending: list[tuple[Any, float, Sequence[Any]]] = []
        self._write(opening)

    def add(self, event: Any, now: float, commands: Sequence[Any]) -> None:
        """Add a decision, in order. It is encoded only by `write`, after its commands are performed."""
        if self._file is not None:
            self._pending.append((event, now, commands))

    def write(self) -> None:
        pending, self._pending = self._pending, []
        for event, now, commands in pending:
            self._write(self._encoder.decision(event, now, commands))
            if type(event) is Ticked:
                self._flush()

    def close(self) -> None:
        self.write()
        self._end(CLOSED)

    def _write(self, frame: bytes) -> None:
        if self._file is None:
            return
        if len(frame) > self._num_left:
            logger.warning("%s has reached recording.max_bytes and ends here", self._file.name)
            self._end(FULL)
            return
        self._num_left -= len(frame)
        try:
            self._file.write(frame)
        except OSError as error:
            self._fail(error)

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def _end(self, reason: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.ending(reason, time.monotonic()))
            self._file.close()
        except OSError as error:
            self._fail(error)
        self._file = None

    def _fail(self, error: OSError) -> None:
        file, self._file = self._file, None
        assert file is not None, "no open file"
        logger.error("%s cannot be written and ends here: %s", file.name, error.strerror)
        try:
            file.close()
        except OSError:
            logger.debug("%s: buffered decisions are lost", file.name)


def open_recorder(config: RecordingConfig, name: str, make: "partial[Any]") -> Recorder | None:
    """Open a recorder of the logic that `make` makes, from keyword arguments alone; None when recording is off. A
    restarted process starts a new file. Raises ConfigError when the file cannot be created."""
    if config.folder is None:
        return None
    assert not make.args, "arguments of a logic have names"
    encoder = RecordEncoder(
        eos_token_ids=make.keywords.get("eos_token_ids", frozenset()),
        secret=secrets.token_bytes(_SECRET_BYTES),
        keeps_tokens=config.tokens,
        keeps_commands=config.commands,
    )
    opening = encoder.opening(name, f"{make.func.__module__}.{make.func.__name__}", make.keywords)
    return Recorder(_create(Path(config.folder), name), encoder, opening, config.max_bytes)


def _create(folder: Path, name: str) -> BinaryIO:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for epoch in count():
            try:
                return open(folder / f"{name}.{epoch}{SUFFIX}", "xb", _BUFFER_BYTES, opener=open_private)
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(f"recording.folder {folder} cannot be written: {error.strerror}") from error
    raise AssertionError("unreachable")

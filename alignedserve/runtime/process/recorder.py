"""Writing a room's recording while it works."""

import logging
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from alignedserve.config.sections import RecordingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.messages.events import Ticked
from alignedserve.messages.recording import CLOSED, FULL, SUFFIX, RecordEncoder

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 256 * 1024
_SECRET_BYTES = 32


class Recorder:
    """Puts a room's decisions into its file. What goes wrong with the file ends the recording, never the room."""

    def __init__(self, file: BinaryIO, encoder: RecordEncoder, opening: bytes, max_bytes: int) -> None:
        """Takes the file over. `opening`: what it begins with."""
        self._file: BinaryIO | None = file
        self._encoder = encoder
        self._num_left = max_bytes
        self._noted: list[tuple[Any, float, Sequence[Any]]] = []
        self._write(opening)

    def note(self, event: Any, now: float, commands: Sequence[Any]) -> None:
        """Remember a decision, in order. Nothing is encoded before `write`: the commands can be performed first."""
        if self._file is not None:
            self._noted.append((event, now, commands))

    def write(self) -> None:
        """Put down what was noted. Every tick it reaches the system, so that little is lost with a killed process."""
        noted, self._noted = self._noted, []
        for event, now, commands in noted:
            self._write(self._encoder.decision(event, now, commands))
            if type(event) is Ticked:
                self._flush()

    def close(self) -> None:
        """The room ends, and its recording with it."""
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
            self._give_up(error)

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _end(self, reason: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.ending(reason, time.monotonic()))
            self._file.close()
        except OSError as error:
            self._give_up(error)
        self._file = None

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        assert file is not None, "nothing to give up"
        logger.error("%s cannot be written and ends here: %s", file.name, error.strerror)
        try:
            file.close()
        except OSError:
            logger.debug("%s: what was buffered is lost", file.name)


def open_recorder(config: RecordingConfig, room: str, make: "partial[Any]") -> Recorder | None:
    """The recorder of a room whose logic `make` makes, out of keywords alone; None when nothing is to be recorded.

    A room that comes again begins another file. Raises ConfigError when there can be none.
    """
    if config.folder is None:
        return None
    assert not make.args, "arguments of a logic have names"
    encoder = RecordEncoder(
        eos_token_ids=make.keywords.get("eos_token_ids", frozenset()),
        secret=secrets.token_bytes(_SECRET_BYTES),
        keeps_tokens=config.tokens,
        keeps_commands=config.commands,
    )
    opening = encoder.opening(room, f"{make.func.__module__}.{make.func.__name__}", make.keywords)
    return Recorder(_create(Path(config.folder), room), encoder, opening, config.max_bytes)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _create(folder: Path, room: str) -> BinaryIO:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for life in count():
            try:
                return open(folder / f"{room}.{life}{SUFFIX}", "xb", _BUFFER_BYTES, opener=_open_private)
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(f"recording.folder {folder} cannot be written: {error.strerror}") from error
    raise AssertionError("unreachable")

"""One room's recording, decided again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alignedserve.core.errors import RecordingError
from alignedserve.messages.recording import ENDED, SUFFIX, Decision, Digester, RecordReader
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.replay.component_kinds import schema_of

CUT, ENDS_BETWEEN = "cut", "unfinished"
_BROKEN = (AssertionError, LookupError, ArithmeticError, AttributeError, TypeError, ValueError)  # of a logic


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that is another one now. Commands are (class, fields) without tokens, in order."""

    number: int  # of the event, from 0
    offset: int  # in the file
    now: float
    event: Any
    expected: Any  # None where the recording has only its digest
    got: Any  # or the error that the logic raised


class Decided(NamedTuple):
    """One event of a recording, and what the logic answers now."""

    event: Any
    now: float
    commands: Sequence[Any]


class ComponentReplay:
    """One file. Iterate over `decided` to its end, then ask what came of it."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError when the file is no recording, or is of a room that this program does not have."""
        self._reader = reader = RecordReader(path)
        self._kind = schema_of(reader)
        try:
            arguments = self._kind.arguments(reader.header.arguments)
            self._logic = self._kind.make(**arguments)
        except (msgspec.MsgspecError, ValueError) as error:
            raise reader.damaged(0, f"its logic cannot be made again: {str(error)[:200]}") from error
        self._digester = Digester()
        self.name = reader.header.room
        registered: WorkerRegistered | None = arguments.get("registered")
        self.pool = registered.pool_name if registered is not None else None  # of a worker: the pool of its node
        self.path = path
        self.num_equal = 0
        self.difference: Difference | None = None
        self.ending = ENDS_BETWEEN  # or CUT, or what the recording itself gives as its reason

    def decided(self) -> Iterator[Decided]:
        """Every event with today's commands, up to and with the first that differ from the recorded ones.

        Later ones would follow from another state. Raises RecordingError where the file is damaged.
        """
        for offset, decision in self._reader.decisions():
            if decision.kind == ENDED:
                self.ending = str(msgspec.msgpack.decode(decision.event))
                return
            try:
                event = self._kind.event(decision)
            except (msgspec.MsgspecError, ValueError) as error:
                raise self._reader.damaged(offset, str(error)[:200]) from error
            commands = self._decide(offset, event, decision)
            if commands is None:
                return
            yield Decided(event, decision.now, commands)
        if self._reader.is_cut:
            self.ending = CUT

    def _decide(self, offset: int, event: Any, decision: Decision) -> Sequence[Any] | None:
        try:
            commands = self._logic.on_event(event, decision.now)
        except _BROKEN as error:
            self._note_difference(offset, event, decision, f"{type(error).__name__}: {error}")
            return None
        encoded = self._digester.encode(commands)
        if self._digester.digest(encoded) != decision.digest:
            self._note_difference(offset, event, decision, msgspec.msgpack.decode(encoded))
            return None
        self.num_equal += 1
        return commands

    def _note_difference(self, offset: int, event: Any, decision: Decision, got: Any) -> None:
        expected = msgspec.msgpack.decode(decision.commands)
        self.difference = Difference(self.num_equal, offset, decision.now, event, expected, got)


def recordings_in(folder: Path) -> list[Path]:
    """Every room's files, by room and by its lives. Raises RecordingError when there is none."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == SUFFIX]
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror}") from error
    if not paths:
        raise RecordingError(f"{folder} holds no recording of a room (*{SUFFIX})")
    return sorted(paths, key=_name_and_epoch)


def _name_and_epoch(path: Path) -> tuple[str, int]:
    room, _, life = path.stem.rpartition(".")
    return room, int(life) if life.isdecimal() else 0

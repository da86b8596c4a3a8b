"""Replay of one component's recording."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import GenericAlias
from typing import Any, NamedTuple, get_type_hints

import msgspec

from alignedserve.core.errors import AlignedServeError, RecordingError
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.events import Logic, PeerConnected, PeerDisconnected, Received, Ticked
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    IterationCompleted,
)
from alignedserve.messages.links import DecodeWorkerInbound, PoolInbound, PrefillWorkerInbound, RouterInbound
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.process.recording import (
    ENDED,
    PART_FILE,
    RUN_FILE,
    SUFFIX,
    VERSION,
    Decision,
    Digester,
    RecordedPart,
    RecordReader,
    RunMetadata,
)
from alignedserve.worker_core import factory as colocated_factory
from decode_worker import factory as decode_factory
from kvpool import logic as pool_logic
from prefill_worker import logic as prefill_logic
from router import logic as router_logic
from router.state import DrainRequested, LengthPredicted


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


CUT, ENDS_BETWEEN = "cut", "unfinished"
_BROKEN = (AssertionError, LookupError, ArithmeticError, AttributeError, TypeError, ValueError)  # of a logic


@dataclass(frozen=True, slots=True)
class ComponentSchema:
    """Factory and events of one kind of component."""

    make: Callable[..., Logic[Any, Any]]
    inbound: Any  # union of its messages
    events: tuple[type, ...] = ()  # beside those of every component
    _decoders: dict[str, msgspec.msgpack.Decoder[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for kind in (PeerConnected, PeerDisconnected, Ticked, *self.events):
            self._decoders[kind.__name__] = msgspec.msgpack.Decoder(kind)
        self._decoders[Received.__name__] = msgspec.msgpack.Decoder(GenericAlias(tuple, (str, self.inbound)))

    def arguments(self, recorded: msgspec.Raw) -> dict[str, Any]:
        """Decode the arguments of `make`. Raises msgspec.ValidationError if they are not the function's."""
        hints = get_type_hints(self.make)
        fields = [
            (name, hints[name]) if parameter.default is parameter.empty else (name, hints[name], parameter.default)
            for name, parameter in signature(self.make).parameters.items()
        ]
        schema = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)
        decoded = msgspec.msgpack.decode(recorded, type=schema)
        return {name: getattr(decoded, name) for name, *_ in fields}

    def event(self, decision: Decision) -> Any:
        """Decode the event of a decision. Raises msgspec.ValidationError for one of another component."""
        decoder = self._decoders.get(decision.kind)
        if decoder is None:
            raise msgspec.ValidationError(f"no event of this component is called {decision.kind[:64]!r}")
        event = decoder.decode(decision.event)
        return Received(*event) if decision.kind == Received.__name__ else event


_SCHEMAS: dict[str, ComponentSchema] = {
    f"{kind.make.__module__}.{kind.make.__name__}": kind
    for kind in (
        ComponentSchema(router_logic.make_logic, RouterInbound, (LengthPredicted, DrainRequested)),
        ComponentSchema(pool_logic.make_logic, PoolInbound),
        ComponentSchema(
            prefill_logic.make_logic,
            PrefillWorkerInbound,
            (IterationCompleted, BlocksLoaded, BlocksOffloaded, BlocksRelayed, BufferOpened),
        ),
        ComponentSchema(
            decode_factory.make_logic, DecodeWorkerInbound, (IterationCompleted, BlocksLoaded, BlocksOffloaded)
        ),
        ComponentSchema(
            colocated_factory.make_colocated_logic,
            DecodeWorkerInbound,
            (IterationCompleted, BlocksLoaded, BlocksOffloaded, BufferOpened),
        ),
    )
}


def schema_of(reader: RecordReader) -> ComponentSchema:
    kind = _SCHEMAS.get(reader.header.made_by)
    if kind is None:
        raise reader.damaged(0, f"no component is made by {reader.header.made_by[:80]!r}")
    return kind


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs. Commands are (class, fields) without tokens, in order."""

    number: int  # of the event, from 0
    offset: int  # in the file
    now: float
    event: Any
    expected: Any  # None if the recording has only its digest
    got: Any  # or the logic's error


class Decided(NamedTuple):
    """One event of a recording, and the logic's commands now."""

    event: Any
    now: float
    commands: Sequence[Any]


class ComponentReplay:
    """Replay of one file: iterate over `decided` to the end, then read the results from the attributes."""

    def __init__(self, path: Path) -> None:
        """Raise RecordingError if the file is no recording, or of a component unknown to this program."""
        self._reader = reader = RecordReader(path)
        self._kind = schema_of(reader)
        try:
            arguments = self._kind.arguments(reader.header.arguments)
            self._logic = self._kind.make(**arguments)
        except (msgspec.MsgspecError, ValueError) as error:
            raise reader.damaged(0, f"its logic cannot be built: {str(error)[:200]}") from error
        self._digester = Digester()
        self.name = reader.header.component
        registered: WorkerRegistered | None = arguments.get("registered")
        self.measured: tuple[Sample, ...] = arguments.get("measured") or ()  # before it served
        self.pool = registered.pool_name if registered is not None else None  # the pool of a worker's node
        self.path = path
        self.num_equal = 0
        self.difference: Difference | None = None
        self.ending = ENDS_BETWEEN  # or CUT, or the reason that the recording gives

    def decided(self) -> Iterator[Decided]:
        """Yield every event with its commands now, up to the first that differ from the recorded ones.

        Later ones would follow from another state. Raises RecordingError if the file is damaged.
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
    """Return the recordings in a folder and in its parts, by component and restart.

    Raises RecordingError if there are none.
    """
    try:
        paths = [path for path in folder.iterdir() if path.suffix == SUFFIX]
        paths += [path for part in parts_in(folder) for path in part.iterdir() if path.suffix == SUFFIX]
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror}") from error
    if not paths:
        raise RecordingError(f"{folder} holds no recording of a component (*{SUFFIX})")
    return sorted(paths, key=_order)


def _order(path: Path) -> tuple[str, int, int]:
    name, _, epoch = path.stem.rpartition(".")
    return name, _number(path.parent.name.rpartition(".")[2]), _number(epoch)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0

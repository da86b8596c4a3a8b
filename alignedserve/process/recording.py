"""The format of recorded runs: the events of one component, their times, and its decisions (docs/replay.md).

A file is the mark, the version, then frames: length, its complement, checksum, MessagePack. The first frame is the
header, the others are decisions, and the last of a recording that ended by itself gives the reason.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from alignedserve.config.sections import ClusterConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import RecordingError
from alignedserve.messages.events import Received, Send
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.process.redaction import KeepDecisions, KeepLengths, Redactor

VERSION = 3  # 3: policies decide otherwise, so recordings of before would not replay
SUFFIX = ".recording"
RUN_FILE, PART_FILE = "run.json", "part.json"
ENDED = "Ended"  # in place of the event's class: the last frame
CLOSED, FULL = "closed", "limit"  # reasons: the component was closed; the recording has reached its limit
_MARK = b"ALSVREC"
_FRAME = struct.Struct("<III")
_LENGTH_BITS = 0xFFFFFFFF
_MAX_FRAME_BYTES = 1 << 28


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of RUN_FILE: what a simulation of the run needs beside the recordings."""

    version: int = VERSION
    config: ClusterConfig  # of several nodes: the first one's sizes, with the counts of all
    layout: BlockLayout
    num_nodes: int = 1


class RecordedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of PART_FILE: another node than the first, whose recordings lie beside it."""

    node: str
    hostname: str
    address: str
    clock_ahead_s: float  # to be added to its times, for those of the first node
    is_whole: bool  # False: the node was lost, or is not to its end


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First frame: the component, and the arguments its logic was built from."""

    component: str
    made_by: str  # the function of the component's factory
    arguments: msgspec.Raw  # of that function, by name
    has_tokens: bool  # token ids are not redacted
    has_commands: bool


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """One event and the commands that followed."""

    kind: str  # class of the event, or ENDED
    now: float
    event: msgspec.Raw  # a message and its sender as a pair; of ENDED: the reason
    digest: int = 0  # of `commands`, see Digester
    commands: msgspec.Raw = msgspec.Raw(b"\xc0")  # (class, command) in order, without tokens; None: not kept


def _plain_number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain_number)


def _tells_names(command: Any) -> bool:
    return type(command) is Send and type(command.message) is PrefixBlocksChanged


class Digester:
    """Encodes commands in a form that does not depend on tokens, and digests it."""

    def __init__(self) -> None:
        self._without_tokens = Redactor(KeepLengths())

    def encode(self, commands: Sequence[Any]) -> bytes:
        """Encode commands as MessagePack of (class, command) in order, without names of blocks.

        Which blocks are told of depends on their hashes, and these on the tokens.
        """
        recorded = [command for command in commands if not _tells_names(command)]
        return _ENCODER.encode([(type(command).__name__, self._without_tokens(command)) for command in recorded])

    @staticmethod
    def digest(encoded: bytes) -> int:
        """Return XXH3-64 of the result of `encode`."""
        return xxhash.xxh3_64_intdigest(encoded)


class RecordEncoder:
    """Encodes one recording. Without `keeps_tokens` it contains no token of a prompt or an answer."""

    def __init__(
        self, *, eos_token_ids: frozenset[int], secret: bytes, keeps_tokens: bool, keeps_commands: bool
    ) -> None:
        self._redactor = None if keeps_tokens else Redactor(KeepDecisions(eos_token_ids, secret))
        self._keeps_commands = keeps_commands
        self._digester = Digester()

    def opening(self, component: str, made_by: str, arguments: Mapping[str, Any]) -> bytes:
        """Encode the beginning of a file: mark, version and header."""
        header = Header(
            component=component,
            made_by=made_by,
            arguments=msgspec.Raw(_ENCODER.encode(dict(arguments))),
            has_tokens=self._redactor is None,
            has_commands=self._keeps_commands,
        )
        return _MARK + bytes([VERSION]) + _framed(_ENCODER.encode(header))

    def decision(self, event: Any, now: float, commands: Sequence[Any]) -> bytes:
        """Encode the next frame."""
        encoded = self._digester.encode(commands)
        redacted = event if self._redactor is None else self._redactor(event)
        payload = (redacted.peer, redacted.message) if type(redacted) is Received else redacted
        raw = msgspec.Raw(encoded) if self._keeps_commands else None
        fields = (type(event).__name__, now, payload, self._digester.digest(encoded), raw)
        return _framed(_ENCODER.encode(fields))

    @staticmethod
    def ending(reason: str, now: float) -> bytes:
        """Encode the last frame."""
        return _framed(_ENCODER.encode((ENDED, now, reason)))


class RecordReader:
    """Reads one file of a recording. Raises RecordingError naming the file and the offset of the damage.

    `is_cut`: set after the last decision if the file ends in the middle of one, as when a process is killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_cut = False
        self._decode = msgspec.msgpack.Decoder(Decision).decode
        with path.open("rb") as file:
            self._check_mark(file)
            first = next(self._frames(file), None)
        if first is None:
            raise RecordingError(f"{path} ends before its header is complete")
        offset, payload = first
        self.header = self._decoded(msgspec.msgpack.Decoder(Header).decode, payload, offset)

    def decisions(self) -> Iterator[tuple[int, Decision]]:
        """Yield every complete decision, with the offset of its frame."""
        with self.path.open("rb") as file:
            self._check_mark(file)
            frames = self._frames(file)
            next(frames)
            for offset, payload in frames:
                yield offset, self._decoded(self._decode, payload, offset)

    def damaged(self, offset: int, problem: str) -> RecordingError:
        """Return the error to raise for the frame at this offset."""
        return RecordingError(f"{self.path} is damaged at byte {offset}: {problem}")

    def _check_mark(self, file: BinaryIO) -> None:
        mark = file.read(len(_MARK) + 1)
        if mark[: len(_MARK)] != _MARK:
            raise RecordingError(f"{self.path} is no recording")
        if mark[len(_MARK) :] != bytes([VERSION]):
            version = mark[-1] if len(mark) > len(_MARK) else "unknown"
            raise RecordingError(f"{self.path} has version {version} of the format; this is version {VERSION}")

    def _frames(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        while True:
            offset = file.tell()
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                self.is_cut = bool(head)
                return
            length, complement, checksum = _FRAME.unpack(head)
            if length != complement ^ _LENGTH_BITS or length > _MAX_FRAME_BYTES:
                raise self.damaged(offset, "no length of a frame")
            payload = file.read(length)
            if len(payload) < length:
                self.is_cut = True
                return
            if xxhash.xxh32_intdigest(payload) != checksum:
                raise self.damaged(offset, "the checksum does not hold")
            yield offset, payload

    def _decoded(self, decode: Any, payload: bytes, offset: int) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise self.damaged(offset, str(error)[:200]) from error


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), len(payload) ^ _LENGTH_BITS, xxhash.xxh32_intdigest(payload)) + payload

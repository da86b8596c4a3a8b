"""Frames between the first rank of a worker and another: over a socket pair, length first, typed MessagePack."""

import socket
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from alignedserve.core.errors import (
    AlignedServeError,
    ConfigError,
    ModelError,
    ModelNotFound,
    NotEnoughMemory,
    ProtocolError,
    UnsafeWeights,
    UnsupportedModel,
)
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig, StateConfig
from kernels.cpu.rank_exchange import ExchangeBroken

_LENGTH_BYTES = 8
_MAX_BYTES = 1 << 30  # of the commands of one step
_MAKING = threading.Lock()
_STATES: tuple[type[Any], ...] = (ShortConvConfig, SpaceConfig, DeltaConfig)
# What loading a share of a model raises.
_KNOWN = (ConfigError, ModelError, ModelNotFound, NotEnoughMemory, UnsafeWeights, UnsupportedModel)
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}
T = TypeVar("T")


class StartAnswer(msgspec.Struct, frozen=True):
    """The answer to the first frame, of stages and processes with experts too: its share is loaded, or not."""

    error: str = ""  # class of core.errors; empty: it is loaded
    message: str = ""  # of the error

    @classmethod
    def failed(cls, error: AlignedServeError) -> "StartAnswer":
        return cls(type(error).__name__, str(error))

    def raise_error(self) -> None:
        if self.error:
            known = next((each for each in _KNOWN if each.__name__ == self.error), AlignedServeError)
            raise known(self.message)


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send a frame. Raises OSError when the other end is gone."""
    connection.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)


def receive_frame(connection: socket.socket) -> bytes | None:
    """Wait for a frame; None: the other end has closed. Raises ProtocolError for one that is too long, OSError."""
    head = receive_bytes(connection, _LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > _MAX_BYTES:
        raise ProtocolError("a frame between ranks is too long")
    content = receive_bytes(connection, length)
    return None if content is None else bytes(content)


def wait_started(connection: socket.socket, message: str) -> None:
    """Wait for StartAnswer. Raises its error, or ExchangeBroken with the message if the other end has closed."""
    payload = receive_frame(connection)
    if payload is None:
        raise ExchangeBroken(message)
    decode(payload, StartAnswer).raise_error()


def encode(content: object) -> bytes:
    return msgspec.msgpack.encode(content, enc_hook=_to_plain)


def decode(payload: bytes, kind: type[T]) -> T:
    try:
        content: T = _decoder(kind).decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"frame refused: {type(error).__name__}") from error
    return content


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder of a kind of frame, made by one thread at a time. msgspec 0.22 ends the process where two
    threads use a type for the first time at once."""
    with _MAKING:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)
        return _DECODERS[kind]


def _to_plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"frames between ranks cannot carry {type(value).__name__}")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is StateConfig and isinstance(value, dict):
        state_class = next((each for each in _STATES if {field.name for field in fields(each)} == value.keys()), None)
        if state_class is not None:
            return msgspec.convert(value, state_class)
    raise NotImplementedError(f"frames between ranks cannot carry {kind.__name__}")


def receive_bytes(connection: socket.socket, length: int) -> bytearray | None:
    content = bytearray(length)
    left = memoryview(content)
    while left:
        got = connection.recv_into(left)
        if not got:
            return None
        left = left[got:]
    return content

"""Reads GGUF files: header, metadata and tensors, in the versions 2 and 3. Nothing in such a file is executed.

A file is untrusted: lengths, counts and offsets are compared with its size before anything is allocated. Tensors are
read, not mapped, so that a file that shrinks meanwhile is an error and not a signal. A model that is split into
several files (NAME-00001-of-00003.gguf) is read by the first, whose metadata counts; the others lie beside it.
"""

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError, ModelNotFound, UnsupportedModel
from alignedserve.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType

MAX_HEADER_BYTES = 64 << 20
MAX_STRINGS = 1 << 22  # of one list
_CHUNK_BYTES = 4 << 20

_UINT8, _BOOL, _STRING, _ARRAY = 0, 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_NUMBER_FORMATS = {
    value_type: struct.Struct("<" + letter)
    for value_type, letter in zip(_NUMBERS, ("B", "b", "H", "h", "I", "i", "f", "Q", "q", "d"), strict=True)
}
_LENGTH = struct.Struct("<Q")

Value = int | float | bool | str | list[str] | npt.NDArray[Any]
SUFFIX = ".gguf"
MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
MAX_NAME_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 20
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_PARTS = 1 << 10
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


class HeaderCursor:
    """Reads one header from its beginning. Every method raises ModelError naming the file."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        """`size`: the bytes of the file, of which at most MAX_HEADER_BYTES are header."""
        self._file = file
        self._where = where
        self._limit = min(size, MAX_HEADER_BYTES)
        self._buffer = bytearray()
        self.position = 0

    def take(self, count: int) -> bytes:
        start = self._advance(count)
        return bytes(self._buffer[start : self.position])

    def number(self, value_type: int) -> int | float:
        layout = _NUMBER_FORMATS[value_type]
        number: int | float = layout.unpack_from(self._buffer, self._advance(layout.size))[0]
        return number

    def uint32(self) -> int:
        return int(self.number(4))

    def uint64(self) -> int:
        return int(self.number(10))

    def text(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Return the next string; what is not UTF-8 in it becomes U+FFFD."""
        (length,) = _LENGTH.unpack_from(self._buffer, self._advance(8))
        if length > max_bytes:
            raise self.error(f"a string of {length} bytes where at most {max_bytes} are allowed")
        start = self._advance(length)
        return self._buffer[start : self.position].decode(errors="replace")

    def value(self) -> Value:
        value_type = self.uint32()
        if value_type == _ARRAY:
            return self._array()
        return self._scalar(value_type)

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self._where} is not a valid GGUF file: {problem} (at byte {self.position}).")

    def _scalar(self, value_type: int) -> Value:
        if value_type == _STRING:
            return self.text()
        if value_type == _BOOL:
            return bool(self.number(_UINT8))
        if value_type not in _NUMBERS:
            raise self.error(f"a value of the unknown type {value_type}")
        return self.number(value_type)

    def _array(self) -> Value:
        value_type, count = self.uint32(), self.uint64()
        if value_type == _STRING:
            if count > MAX_STRINGS:
                raise self.error(f"a list of {count} strings where at most {MAX_STRINGS} are allowed")
            self._require(8 * count)
            return self._texts(count)
        name = "<u1" if value_type == _BOOL else _NUMBERS.get(value_type)
        if name is None:
            raise self.error(f"a list of values of the unknown type {value_type}")
        numbers = np.dtype(name)
        # The copy lets the buffer grow again.
        return np.frombuffer(self.take(count * numbers.itemsize), numbers)

    def _texts(self, count: int) -> list[str]:
        buffer, texts = self._buffer, []
        for _ in range(count):
            start = self.position + 8
            end = start + _LENGTH.unpack_from(buffer, self.position)[0] if start <= len(buffer) else self._limit + 1
            if end > len(buffer):
                texts.append(self.text())
                continue
            texts.append(buffer[start:end].decode(errors="replace"))
            self.position = end
        return texts

    def _require(self, count: int) -> None:
        if count > self._limit - self.position:
            raise self.error(f"{count} bytes are needed where {self._limit - self.position} are left")

    def _advance(self, count: int) -> int:
        start = self.position
        end = start + count
        if end > len(self._buffer):
            self._require(count)
            self._buffer += self._file.read(max(end - len(self._buffer), min(_CHUNK_BYTES, self._limit - end)))
            if end > len(self._buffer):
                raise self.error("it ends here")
        self.position = end
        return start


def is_gguf(path: Path) -> bool:
    """Return whether the path names a GGUF file rather than a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in its file."""

    name: str
    shape: tuple[int, ...]  # the last dimension is a row; rows lie one after another
    type: TensorType
    path: Path  # of the file, or part, that holds it
    offset: int  # from the beginning of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    def part(self, index: int) -> "GgufTensor":
        """Return a part along the first dimension as a tensor of its own."""
        num_bytes = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * num_bytes, num_bytes=num_bytes)


class GgufFile:
    """The metadata and tensors of one model, its headers read once. Raises ModelError naming the file."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or the first part of several."""
        self.path = path
        header = _read_header(path)
        self.metadata: dict[str, Value] = header.metadata
        self.tensors: dict[str, GgufTensor] = {tensor.name: tensor for tensor in header.tensors}
        self._add_parts()

    def raw_rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return a copy of the tensor's bytes: uint8 [rows, bytes of a row]."""
        try:
            raw: npt.NDArray[Any] = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        except OSError as error:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} cannot be read: {error}.") from error
        if len(raw) != tensor.num_bytes:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} ends after {len(raw)} of {tensor.num_bytes} bytes.")
        return raw.reshape(tensor.num_rows, -1)

    def _add_parts(self) -> None:
        count = _split_number(self.metadata, "count", self.path)
        if count <= 1:
            return
        paths = _part_paths(self.path, self.metadata, count)
        for number, path in enumerate(paths[1:], start=1):
            metadata, tensors = _read_part(path, self.path)
            if [_split_number(metadata, name, path) for name in ("no", "count")] != [number, count]:
                raise ModelError(f"{path} is not part {number + 1} of {count} of the model in {self.path}.")
            twice = next((tensor.name for tensor in tensors if tensor.name in self.tensors), None)
            if twice is not None:
                raise ModelError(f"{path}: tensor {twice[:80]} is in another part as well.")
            self.tensors |= {tensor.name: tensor for tensor in tensors}
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelError(f"{self.path}: all parts have {len(self.tensors)} tensors, where {total} are announced.")


def gguf_stem(name: str) -> str:
    """Return a file's name without its suffix and its number among several parts."""
    part = _PART_NAME.fullmatch(name)
    return part["stem"] if part else name[: -len(SUFFIX)]


def part_names(name: str) -> list[str]:
    """List the files of a split model, given the name of its first; otherwise the file itself.

    Raises ModelError for any other part of a split model, and where it has too many parts.
    """
    part = _PART_NAME.fullmatch(name)
    if part is None:
        return [name]
    number, count = int(part["number"]), int(part["count"])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise ModelError(f"{name} is not named as one of at most {_MAX_PARTS} parts of a GGUF model.")
    names = [f"{part['stem']}-{index:05}-of-{count:05}{name[-len(SUFFIX) :]}" for index in range(1, count + 1)]
    if number != 1:
        raise ModelError(f"{name} is part {number} of {count} of a model; name the first, {names[0]}.")
    return names


def _part_paths(path: Path, metadata: dict[str, Value], count: int) -> list[Path]:
    number = _split_number(metadata, "no", path)
    names = part_names(path.name)
    if len(names) != count or number:
        raise ModelError(
            f"{path} is part {number + 1} of {count} of a model, but not named so; the first part is named "
            f"NAME-00001-of-{count:05}{SUFFIX}, and the others lie beside it."
        )
    return [path.with_name(name) for name in names]


def _read_part(path: Path, first: Path) -> tuple[dict[str, Value], list[GgufTensor]]:
    try:
        header = _read_header(path)
    except ModelNotFound:
        raise ModelNotFound(f"{path} is missing: a part of the model in {first}.") from None
    return header.metadata, header.tensors


def _split_number(metadata: dict[str, Value], name: str, path: Path) -> int:
    value = metadata.get(f"split.{name}", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_PARTS:
        raise ModelError(f"{path}: split.{name} must be a number up to {_MAX_PARTS}.")
    return value


def _read_header(path: Path) -> "_Header":
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _Header(HeaderCursor(file, size, str(path)), size, path)
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


class _Header:
    def __init__(self, cursor: HeaderCursor, size: int, path: Path) -> None:
        self._cursor = cursor
        self._path = path
        _check_version(cursor, str(path))
        num_tensors, num_entries = cursor.uint64(), cursor.uint64()
        for name, count in (("tensors", num_tensors), ("entries of metadata", num_entries)):
            if count > MAX_ENTRIES:
                raise cursor.error(f"{count} {name}, where at most {MAX_ENTRIES} are allowed")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = cursor.text(MAX_NAME_BYTES)
            if key in self.metadata:
                raise cursor.error(f"two entries named {key[:80]!r}")
            self.metadata[key] = cursor.value()
        relative = [self._tensor() for _ in range(num_tensors)]
        self.tensors = _placed(relative, cursor, self._alignment(), size)

    def _tensor(self) -> GgufTensor:
        cursor = self._cursor
        name = cursor.text(MAX_NAME_BYTES)
        num_dimensions = cursor.uint32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise cursor.error(f"tensor {name[:80]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.uint64() for _ in range(num_dimensions)]))
        number, offset = cursor.uint32(), cursor.uint64()
        tensor_type = TENSOR_TYPES.get(number)
        if tensor_type is None:
            known = ", ".join(known.name for known in TENSOR_TYPES.values())
            shown = OTHER_TYPES.get(number, f"number {number}")
            raise UnsupportedModel(f"{self._path}: tensor {name[:80]} has the type {shown}, which is none of {known}.")
        row_bytes = tensor_type.row_bytes(shape[-1])
        if row_bytes is None or min(shape) < 1:
            raise cursor.error(f"tensor {name[:80]!r} has the shape {list(shape)}, not rows of {tensor_type.name}")
        return GgufTensor(name, shape, tensor_type, self._path, offset, math.prod(shape[:-1]) * row_bytes)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_valid = isinstance(alignment, int) and 1 <= alignment <= MAX_ALIGNMENT and not alignment & (alignment - 1)
        if not is_valid:
            raise self._cursor.error("general.alignment is not a small power of two")
        assert isinstance(alignment, int)
        return alignment


def _check_version(cursor: HeaderCursor, where: str) -> None:
    if cursor.take(4) != _MAGIC:
        raise cursor.error("it does not begin with GGUF")
    version = cursor.uint32()
    if version in _VERSIONS:
        return
    if version in (number << 24 for number in _VERSIONS):
        raise UnsupportedModel(f"{where} is big-endian; only little-endian GGUF files are read.")
    raise UnsupportedModel(f"{where} is GGUF version {version}; the versions 2 and 3 are read.")


def _placed(tensors: list[GgufTensor], cursor: HeaderCursor, alignment: int, size: int) -> list[GgufTensor]:
    begin = -(-cursor.position // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for tensor in tensors:
        offset = begin + tensor.offset
        if tensor.offset % alignment or offset + tensor.num_bytes > size:
            raise cursor.error(
                f"tensor {tensor.name[:80]!r} of {tensor.num_bytes} bytes at {offset} lies outside the file of {size}, "
                "which may be truncated"
            )
        if tensor.name in placed:
            raise cursor.error(f"two tensors named {tensor.name[:80]!r}")
        placed[tensor.name] = replace(tensor, offset=offset)
    return list(placed.values())

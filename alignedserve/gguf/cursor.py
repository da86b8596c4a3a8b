"""Bounded reading of a GGUF file's header: no length in it is believed before it is compared with what is left."""

import struct
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError

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
        """Return the next `count` bytes."""
        start = self._advance(count)
        return bytes(self._buffer[start : self.position])

    def number(self, value_type: int) -> int | float:
        """Return the next number of this type."""
        layout = _NUMBER_FORMATS[value_type]
        found: int | float = layout.unpack_from(self._buffer, self._advance(layout.size))[0]
        return found

    def uint32(self) -> int:
        """Return the next unsigned number of 32 bits."""
        return int(self.number(4))

    def uint64(self) -> int:
        """Return the next unsigned number of 64 bits."""
        return int(self.number(10))

    def text(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Return the next string; what is not UTF-8 in it becomes U+FFFD."""
        (length,) = _LENGTH.unpack_from(self._buffer, self._advance(8))
        if length > max_bytes:
            raise self.error(f"a string of {length} bytes where at most {max_bytes} are allowed")
        start = self._advance(length)
        return self._buffer[start : self.position].decode(errors="replace")

    def value(self) -> Value:
        """Return the next value, which its type precedes."""
        value_type = self.uint32()
        if value_type == _ARRAY:
            return self._array()
        return self._scalar(value_type)

    def error(self, problem: str) -> ModelError:
        """Return the error to raise."""
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
            return [self.text() for _ in range(count)]
        name = "<u1" if value_type == _BOOL else _NUMBERS.get(value_type)
        if name is None:
            raise self.error(f"a list of values of the unknown type {value_type}")
        numbers = np.dtype(name)
        # The copy lets the buffer grow again.
        return np.frombuffer(self.take(count * numbers.itemsize), numbers)

    def _require(self, count: int) -> None:
        if count > self._limit - self.position:
            raise self.error(f"{count} bytes are needed where {self._limit - self.position} are left")

    def _advance(self, count: int) -> int:
        """Pass over `count` bytes and return where they begin in the buffer."""
        start = self.position
        end = start + count
        if end > len(self._buffer):
            self._require(count)
            self._buffer += self._file.read(max(end - len(self._buffer), min(_CHUNK_BYTES, self._limit - end)))
            if end > len(self._buffer):
                raise self.error("it ends here")
        self.position = end
        return start

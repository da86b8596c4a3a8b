"""Reads GGUF files: header, metadata and tensors, in the versions 2 and 3. Nothing in such a file is executed.

A file is untrusted: lengths, counts and offsets are compared with its size before anything is allocated. Tensors are
read, not mapped, so that a file that shrinks meanwhile is an error and not a signal.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError, ModelNotFound, UnsupportedModel
from alignedserve.runtime.model.gguf.cursor import HeaderCursor, Value
from alignedserve.runtime.model.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType

SUFFIX = ".gguf"
MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
MAX_NAME_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 20
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


def is_gguf(path: Path) -> bool:
    """Return whether the path names a GGUF file rather than a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in its file."""

    name: str
    shape: tuple[int, ...]  # the last dimension is that of rows, which lie one after the other
    type: TensorType
    offset: int  # from the beginning of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Return the number of rows, whatever the number of dimensions."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """The metadata and tensors of one file, its header read once. Raises ModelError naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = _Header(HeaderCursor(file, size, str(path)), size, str(path))
        except FileNotFoundError:
            raise ModelNotFound(f"{path} does not exist.") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        self.metadata: dict[str, Value] = header.metadata
        self.tensors: dict[str, GgufTensor] = {tensor.name: tensor for tensor in header.tensors}

    def raw_rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes as they are: uint8 [rows, bytes of a row], a copy."""
        try:
            raw: npt.NDArray[Any] = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        except OSError as error:
            raise ModelError(f"{self.path}: tensor {tensor.name} cannot be read: {error}.") from error
        if len(raw) != tensor.num_bytes:
            raise ModelError(f"{self.path}: tensor {tensor.name} ends after {len(raw)} of {tensor.num_bytes} bytes.")
        return raw.reshape(tensor.num_rows, -1)


class _Header:
    def __init__(self, cursor: HeaderCursor, size: int, where: str) -> None:
        self._cursor = cursor
        self._where = where
        _check_version(cursor, where)
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
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise UnsupportedModel(
                f"{where} is one of several parts of a model, which are not read; join them (llama-gguf-split --merge)."
            )
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
            raise UnsupportedModel(f"{self._where}: tensor {name[:80]} has the type {shown}, which is none of {known}.")
        row_bytes = tensor_type.row_bytes(shape[-1])
        if row_bytes is None or min(shape) < 1:
            raise cursor.error(f"tensor {name[:80]!r} has the shape {list(shape)}, not rows of {tensor_type.name}")
        return GgufTensor(name, shape, tensor_type, offset, math.prod(shape[:-1]) * row_bytes)

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
    """Return the tensors with offsets from the beginning of the file. Raises ModelError for one that lies outside."""
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
        placed[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.num_bytes)
    return list(placed.values())

"""The tensors of a Hugging Face model folder as a source of weights.

Files are read, not mapped: what is read does not count as memory of the process, and a file that becomes shorter
meanwhile is an error, not a signal that ends the process."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import ModelError
from alignedserve.runtime.device.memory_maps import huge_pages
from alignedserve.runtime.model.sharding.regions import Region
from alignedserve.runtime.model.sharding.tensor_shard import Span
from alignedserve.runtime.model.weight_index import TensorLocation, WeightIndex
from alignedserve.runtime.model.weights.weight_source import WeightSource
from kernels.cpu.packed_linear import FileRows

_WEIGHT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPES = {
    **_WEIGHT_DTYPES,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PIECE_BYTES = 16 << 20  # that are read at a time


class SafetensorsSource(WeightSource):
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.index = WeightIndex(folder)

    @override
    def has(self, name: str) -> bool:
        return name in self.index.file_of

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return _read(name, self._matrix(name, shape), self.dtype).to(self.device)

    @override
    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return _read(name, self._matrix(name, shape), torch.float32).to(self.device)

    @override
    def region(self, name: str, region: Region) -> Tensor:
        whole = self._matrix(name, region.shape)
        parts = [_read_rows(name, whole, rows, region.columns, self.dtype) for rows in region.rows]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)

    def stored(self, name: str) -> Tensor:
        """Return the tensor as it is stored, on the CPU. Raises ModelError naming tensor and file."""
        location = self._location(name)
        return _read(name, location, _DTYPES[location.dtype])

    def stored_member(self, name: str, number: int) -> Tensor:
        location = self._location(name)
        return _read(name, _member(location, number), _DTYPES[location.dtype])

    @override
    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        if self.device.type != "cpu":
            return None
        location = self._matrix(name, shape)
        return FileRows(location.path, location.offset, *shape, _DTYPES[location.dtype])

    def _matrix(self, name: str, shape: tuple[int, ...]) -> TensorLocation:
        location = self._location(name)
        if location.shape != shape:
            raise ModelError(
                f"{location.path}: tensor {name} has shape {list(location.shape)}, expected {list(shape)}."
            )
        if location.dtype not in _WEIGHT_DTYPES:
            stored = _DTYPES[location.dtype]
            raise ModelError(f"{location.path}: tensor {name} has dtype {stored}, expected a float of 16 or 32 bits.")
        return location

    def _location(self, name: str) -> TensorLocation:
        location = self.index.location(name) or self._of_stack(name)
        if location is None:
            raise ModelError(self._absence(name))
        if location.dtype not in _DTYPES:
            raise ModelError(f"{location.path}: tensor {name} has dtype {location.dtype}, which is not supported.")
        if location.num_bytes != math.prod(location.shape) * _DTYPES[location.dtype].itemsize:
            raise ModelError(
                f"{location.path}: tensor {name} has {location.num_bytes} bytes, which is not its shape's."
            )
        return location

    def _of_stack(self, name: str) -> TensorLocation | None:
        """Return where one expert's matrix lies in a tensor of all: `a.3.weight` is number 3 of `a.weight` or of `a`,
        `a.3.bias` of `a_bias`."""
        matrix, _, kind = name.rpartition(".")
        module, _, number = matrix.rpartition(".")
        names = {"weight": (f"{module}.weight", module), "bias": (f"{module}_bias",)}.get(kind, ())
        locations = (self.index.location(each) for each in names if number.isdecimal())
        whole = next((each for each in locations if each is not None), None)
        if whole is None or len(whole.shape) != (3 if kind == "weight" else 2) or int(number) >= whole.shape[0]:
            return None
        return _member(whole, int(number))

    def _absence(self, name: str) -> str:
        packed = (name.removesuffix(".weight") + suffix for suffix in (".qweight", ".weight_packed"))
        packed_name = next((each for each in packed if self.has(each)), None)
        if packed_name is None:
            return f"Tensor {name} is in none of {', '.join(file.name for file in self.index.files)}."
        return f"{self.index.folder}: {packed_name} is there, but config.json has no quantization_config for it."


def _read(name: str, location: TensorLocation, dtype: torch.dtype) -> Tensor:
    try:
        return _values(location, dtype)
    except (OSError, EOFError) as error:
        raise ModelError(f"{location.path}: tensor {name} cannot be read: {error}") from error


def _read_rows(name: str, whole: TensorLocation, rows: Span, columns: Span | None, dtype: torch.dtype) -> Tensor:
    if columns is None:
        return _read(name, _rows_of(whole, rows), dtype)
    part = _new_memory((rows.size, columns.size), dtype)
    step = max(_PIECE_BYTES // (whole.shape[1] * dtype.itemsize), 1)
    for start in range(rows.start, rows.stop, step):
        piece = Span(start, min(start + step, rows.stop))
        values = _read(name, _rows_of(whole, piece), dtype)
        part[piece.start - rows.start : piece.stop - rows.start] = values[:, columns.start : columns.stop]
    return part


def _rows_of(whole: TensorLocation, rows: Span) -> TensorLocation:
    row_bytes = whole.num_bytes // whole.shape[0]
    shape = (rows.size, *whole.shape[1:])
    return whole._replace(offset=whole.offset + rows.start * row_bytes, num_bytes=rows.size * row_bytes, shape=shape)


def _member(whole: TensorLocation, number: int) -> TensorLocation:
    rows = _rows_of(whole, Span(number, number + 1))
    return rows._replace(shape=rows.shape[1:])


def _values(location: TensorLocation, dtype: torch.dtype) -> Tensor:
    stored_dtype = _DTYPES[location.dtype]
    values = _new_memory(location.shape, dtype)
    flat, step = values.view(-1), _PIECE_BYTES // stored_dtype.itemsize
    pieces = range(0, len(flat), step)
    with location.path.open("rb", buffering=0) as file:

        def read(begin: int) -> None:
            part = flat[begin : begin + step]
            stored = part if dtype == stored_dtype else torch.empty_like(part, dtype=stored_dtype)
            _fill(stored, file.fileno(), location.offset + begin * stored_dtype.itemsize)
            if stored is not part:
                part.copy_(stored)

        if dtype == stored_dtype and len(pieces) > 1:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                list(threads.map(read, pieces))
        else:  # conversions take all cores by themselves
            for begin in pieces:
                read(begin)
    return values


def _new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _PIECE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(huge_pages(num_bytes, populated_bytes=0), dtype=dtype).view(shape)


def _fill(values: Tensor, file_descriptor: int, offset: int) -> None:
    left: memoryview[int] = values.view(torch.uint8).numpy().data
    while left:
        got = os.preadv(file_descriptor, [left], offset)
        if not got:
            raise EOFError("the file has become shorter")
        left, offset = left[got:], offset + got

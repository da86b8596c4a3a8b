"""The tensors of a Hugging Face model folder as a source of weights.

Files are read, not mapped: what is read does not count as memory of the process, and a file that becomes shorter
meanwhile is an error, not a signal that ends the process.
"""

import io
import math
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.weight_index import TensorLocation, WeightIndex
from kernels.cpu.packed_linear import FileRows

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OTHER_DTYPES = {"F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_PIECE_BYTES = 16 << 20  # that are converted at a time


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.index = WeightIndex(folder)

    def has(self, name: str) -> bool:
        """Return whether a file holds a tensor of this name."""
        return name in self.index.file_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, converted and moved. Raises ModelError naming tensor and file."""
        location = self._location(name, shape)
        try:
            return _read(location, self.dtype).to(self.device)
        except (OSError, EOFError) as error:
            raise ModelError(f"{location.path}: tensor {name} cannot be read: {error}") from error

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows:
        """Return where the matrix lies. Raises ModelError naming tensor and file."""
        location = self._location(name, shape)
        return FileRows(location.path, location.offset, *shape, _DTYPES[location.dtype])

    def _location(self, name: str, shape: tuple[int, ...]) -> TensorLocation:
        found = self.index.location(name)
        if found is None:
            raise ModelError(f"Tensor {name} is in none of {', '.join(file.name for file in self.index.files)}.")
        if found.shape != shape:
            raise ModelError(f"{found.path}: tensor {name} has shape {list(found.shape)}, expected {list(shape)}.")
        dtype = _DTYPES.get(found.dtype)
        if dtype is None:
            stored = _OTHER_DTYPES.get(found.dtype, found.dtype)
            raise ModelError(f"{found.path}: tensor {name} has dtype {stored}, expected a float of 16 or 32 bits.")
        if found.num_bytes != math.prod(shape) * dtype.itemsize:
            raise ModelError(f"{found.path}: tensor {name} has {found.num_bytes} bytes, which is not its shape's.")
        return found


def _read(location: TensorLocation, dtype: torch.dtype) -> Tensor:
    """Read a tensor as `dtype`. Raises OSError, or EOFError for a file that is too short."""
    stored_dtype = _DTYPES[location.dtype]
    values = torch.empty(location.shape, dtype=dtype)
    flat = values.view(-1)
    step = _PIECE_BYTES // stored_dtype.itemsize
    same = stored_dtype == dtype
    piece = flat if same else torch.empty(min(len(flat), step), dtype=stored_dtype)
    with location.path.open("rb", buffering=0) as file:
        file.seek(location.offset)
        for begin in range(0, len(flat), step):
            end = min(begin + step, len(flat))
            read = flat[begin:end] if same else piece[: end - begin]
            _fill(file, read)
            if not same:
                flat[begin:end] = read
    return values


def _fill(file: io.FileIO, values: Tensor) -> None:
    left: memoryview[int] = values.view(torch.uint8).numpy().data
    while left:
        got = file.readinto(left)
        if not got:
            raise EOFError("the file has become shorter")
        left = left[got:]

"""Float tensors of safetensors files as numpy arrays, without torch; bfloat16 too, which numpy lacks."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.gguf.config import EMBEDDING
from alignedserve.runtime.model.weight_index import WeightIndex
from kernels.block_values import unpack_rows

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def gguf_embedding(path: Path) -> npt.NDArray[np.float32]:
    """Read the token embedding of a GGUF file. Raises ModelError."""
    file = GgufFile(path)
    tensor = file.tensors.get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{path} holds no token embedding ({EMBEDDING}).")
    return unpack_rows(file.raw_rows(tensor), tensor.type.name)


class FloatTensors:
    """The tensors of a model folder. Raises the errors of WeightIndex: pickle-based files are refused."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = WeightIndex(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._index.file_of

    def read(self, name: str, num_dimensions: int) -> npt.NDArray[np.float32]:
        """Read a tensor as float32. Raises ModelError naming it if it is missing, not floats, or of another shape."""
        entry = self._index.location(name)
        if entry is None:
            raise ModelError(f"{self._folder} holds no tensor {name}.")
        if entry.dtype not in _DTYPES or len(entry.shape) != num_dimensions:
            wanted = f"floats of 16 or 32 bits in {num_dimensions} dimensions"
            raise ModelError(f"{entry.path}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected {wanted}.")
        stored_dtype = np.dtype(_DTYPES[entry.dtype])
        count = entry.num_bytes // stored_dtype.itemsize
        stored = np.fromfile(entry.path, stored_dtype, count, offset=entry.offset).reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return stored.astype(np.float32)

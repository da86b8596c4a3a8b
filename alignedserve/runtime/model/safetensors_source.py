"""The tensors of a Hugging Face model folder as a source of weights."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.weight_index import WeightIndex

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.index = WeightIndex(folder, "pt")

    def has(self, name: str) -> bool:
        """Return whether a file holds a tensor of this name."""
        return name in self.index.file_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, converted and moved. Raises ModelError naming tensor and file."""
        stored = self.stored(name)
        path = self.index.file_of[name]
        if tuple(stored.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}.")
        if stored.dtype not in _WEIGHT_DTYPES:
            raise ModelError(f"{path}: tensor {name} has dtype {stored.dtype}, expected a float of 16 or 32 bits.")
        # A copy even where nothing changes: the stored tensor may be a view of the mapped file.
        return stored.to(device=self.device, dtype=self.dtype, copy=True)

    def stored(self, name: str) -> Tensor:
        """Return the tensor as it is stored, possibly a view of the file. Raises ModelError naming tensor and file."""
        path = self.index.file_of.get(name)
        if path is None:
            raise ModelError(self._absence(name))
        try:
            stored: Tensor = self.index.files[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        return stored

    def _absence(self, name: str) -> str:
        packed = (name.removesuffix(".weight") + suffix for suffix in (".qweight", ".weight_packed"))
        found = next((each for each in packed if self.has(each)), None)
        if found is None:
            return f"Tensor {name} is in none of {', '.join(file.name for file in self.index.files)}."
        return f"{self.index.folder}: {found} is there, but config.json has no quantization_config for it."

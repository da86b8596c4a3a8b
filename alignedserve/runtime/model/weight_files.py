"""Reads the safetensors files of a Hugging Face model folder. Pickle-based files are refused, whatever their name."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.weight_index import WeightIndex
from alignedserve.runtime.model.weight_loader import DecoderWeights, LoadingObserver, assemble_weights

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    *,
    observer: LoadingObserver | None = None,
) -> DecoderWeights:
    """Load the weights in `folder`, which may be a GGUF file, as `dtype`.

    Those of linear layers with 8 bits when `quantization` is "int8".

    Raises UnsafeWeights when there are only pickle-based files, ModelNotFound when a file is missing, ModelError
    naming the file that is truncated, the tensor that is missing or has the wrong shape or dtype, or the layer that
    cannot be packed with 8 bits.
    """
    if is_gguf(folder):
        source = GgufSource(GgufFile(folder), config, dtype, torch.device(device))
        return assemble_weights(config, source, quantization, blocks=source, observer=observer)
    return assemble_weights(
        config, SafetensorsSource(folder, dtype, torch.device(device)), quantization, observer=observer
    )


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._index = WeightIndex(folder, "pt")

    def has(self, name: str) -> bool:
        """Return whether a file holds a tensor of this name."""
        return name in self._index.file_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, converted and moved. Raises ModelError naming tensor and file."""
        path = self._index.file_of.get(name)
        if path is None:
            raise ModelError(f"Tensor {name} is in none of {', '.join(file.name for file in self._index.files)}.")
        try:
            stored: Tensor = self._index.files[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tuple(stored.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}.")
        if stored.dtype not in _WEIGHT_DTYPES:
            raise ModelError(f"{path}: tensor {name} has dtype {stored.dtype}, expected a float of 16 or 32 bits.")
        # A copy even where nothing changes: the stored tensor may be a view of the mapped file.
        return stored.to(device=self._device, dtype=self._dtype, copy=True)

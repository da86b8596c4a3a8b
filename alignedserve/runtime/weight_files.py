"""Reads the safetensors files of a Hugging Face model folder. Pickle-based files are refused, whatever their name."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignedserve.core.errors import ModelError, ModelNotFound, UnsafeWeights
from alignedserve.runtime.json_fields import read_json_object
from alignedserve.runtime.model_config import ModelConfig
from alignedserve.runtime.weights import DecoderWeights, assemble_weights

MAX_INDEX_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """The weights in `folder`, converted to `dtype`.

    Raises UnsafeWeights when there are only pickle-based files, ModelNotFound when a file is missing, ModelError
    naming the file that is truncated or the tensor that is missing or has the wrong shape or dtype.
    """
    return assemble_weights(config, SafetensorsSource(folder, dtype, torch.device(device)))


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Path] = {}
        listed = _listed_shards(folder)
        self._files = {path: _open(path) for path in listed}
        for path, file in self._files.items():
            self._file_of.update(dict.fromkeys(file.keys(), path))
        for name, path in _weight_map(folder).items():
            if self._file_of.get(name) != path:
                raise ModelError(f"{path} does not hold tensor {name}, which {INDEX_NAME} places there.")

    def has(self, name: str) -> bool:
        """Whether a file holds a tensor of this name."""
        return name in self._file_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, converted and moved. Raises ModelError naming tensor and file."""
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"Tensor {name} is in none of {', '.join(file.name for file in self._files)}.")
        try:
            stored: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tuple(stored.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}.")
        if stored.dtype not in _WEIGHT_DTYPES:
            raise ModelError(f"{path}: tensor {name} has dtype {stored.dtype}, expected a float of 16 or 32 bits.")
        # A copy even where nothing changes: the stored tensor may be a view of the mapped file.
        return stored.to(device=self._device, dtype=self._dtype, copy=True)


def _listed_shards(folder: Path) -> list[Path]:
    if (folder / INDEX_NAME).exists():
        return sorted(set(_weight_map(folder).values()))
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if unsafe:
        raise UnsafeWeights(
            f"{folder} holds weights only as {unsafe[0]}, a pickle format that can run code when loaded; "
            "convert them to safetensors."
        )
    raise ModelNotFound(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name to file, as the index has it; empty without an index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return {}
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object with at least one tensor.")
    return {name: folder / _shard_name(path, shard) for name, shard in weight_map.items()}


def _shard_name(index: Path, shard: object) -> str:
    """A plain file name: an index must not reach outside its folder."""
    if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise ModelError(f"{index}: {shard!r} is not the name of a safetensors file.")
    return shard


def _open(path: Path) -> Any:
    if not path.exists():
        raise ModelNotFound(f"{path} is missing.")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error

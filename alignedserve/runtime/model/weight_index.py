"""The index of safetensors files in a Hugging Face model folder and of their tensors; without torch.

Pickle-based files are refused, whatever their name."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from alignedserve.core.errors import ModelError, ModelNotFound, UnsafeWeights
from alignedserve.core.json_fields import read_json_object

MAX_INDEX_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # safetensors reads no longer ones
_FIRST_BYTE = "__metadata__"  # among the tensors of a header that is read: what stands there is not needed
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class TensorHeader(NamedTuple):
    """The form of a tensor, by the header of its file."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it, such as F16 or I32


class TensorLocation(NamedTuple):
    """The place of a tensor's numbers in a file, and their form, as the file's header has them."""

    path: Path
    offset: int
    num_bytes: int
    dtype: str  # as safetensors spells it, such as F16 or I32
    shape: tuple[int, ...]


class WeightIndex:
    """The tensors of model.safetensors, or of the shards in its index. Headers are checked against the sizes of
    files. Raises UnsafeWeights when there are only pickle-based files, ModelNotFound, ModelError naming the file."""

    def __init__(self, folder: Path, framework: str = "numpy") -> None:
        self.folder = folder
        self.files: dict[Path, Any] = {path: _open(path, framework) for path in listed_shards(folder)}
        self.file_of: dict[str, Path] = {}
        self._headers: dict[Path, dict[str, Any]] = {}
        names_in = {path: dict.fromkeys(file.keys(), path) for path, file in self.files.items()}
        for names in names_in.values():
            self.file_of.update(names)
        for name, path in _weight_map(folder).items():
            if name not in names_in[path]:
                raise ModelError(f"{path} does not hold tensor {name}, which {INDEX_NAME} places there.")
            self.file_of[name] = path  # whatever another file holds under this name

    def location(self, name: str) -> TensorLocation | None:
        """Return where a tensor lies; None: no file holds one of this name. Raises ModelError."""
        path = self.file_of.get(name)
        if path is None:
            return None
        try:
            if path not in self._headers:
                self._headers[path] = _read_header(path)
            header = self._headers[path]
            begin, end = header[name]["data_offsets"]
            first = header[_FIRST_BYTE]
            return TensorLocation(path, first + begin, end - begin, header[name]["dtype"], tuple(header[name]["shape"]))
        except (OSError, ValueError, LookupError, TypeError) as error:  # another file than was checked
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error

    def header(self, name: str) -> TensorHeader | None:
        """Return the form of a tensor; None: no file holds one of this name. Raises ModelError."""
        location = self.location(name)
        return None if location is None else TensorHeader(location.shape, location.dtype)


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    return {**header, _FIRST_BYTE: 8 + length}


def listed_shards(folder: Path) -> list[Path]:
    """Return the files of weights, whether they are there or not. Raises like WeightIndex."""
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).exists():
        return sorted(set(_weight_map(folder).values()))
    unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if unsafe:
        raise UnsafeWeights(
            f"{folder} holds weights only as {unsafe[0]}, a pickle format that can run code when loaded; "
            "convert them to safetensors."
        )
    raise ModelNotFound(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")


def _weight_map(folder: Path) -> dict[str, Path]:
    path = folder / INDEX_NAME
    if not path.exists() or (folder / SINGLE_NAME).exists():  # beside the whole, an index is left over
        return {}
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object with at least one tensor.")
    return {name: folder / _shard_name(path, shard) for name, shard in weight_map.items()}


def _shard_name(index: Path, shard: object) -> str:
    if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise ModelError(f"{index}: {shard!r} is not the name of a safetensors file.")
    return shard


def _open(path: Path, framework: str) -> Any:
    if not path.exists():
        raise ModelNotFound(f"{path} is missing.")
    try:
        return safe_open(path, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error

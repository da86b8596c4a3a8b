"""The served model's own token embeddings, mean-pooled: needs no other model and runs none."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.config import EMBEDDING
from alignedserve.runtime.model.weight_index import TensorLocation, WeightIndex
from kernels.weight_blocks.block_values import unpack_rows
from router.prediction.encoders import KEY_LEN, PromptCode, normalised, random_projection, window_of

_MAX_FEATURES = 256
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Rows = npt.NDArray[np.float32]


class TokenEmbeddings:
    """Mean of the embedding rows of a prompt's tokens, less the mean of all rows.

    The mean is most of a trained embedding and does not tell prompts apart, so it is subtracted. Rows longer than 256
    are reduced to 256 by a seeded random projection, and keys to KEY_LEN by another.
    """

    least_similarity = 0.9

    def __init__(self, rows: Rows, *, seed: int = 0) -> None:
        rows = rows - rows.mean(axis=0)
        if rows.shape[1] > _MAX_FEATURES:
            rows = rows @ random_projection(rows.shape[1], _MAX_FEATURES, seed)
        self._rows = rows
        self.num_features = rows.shape[1]
        self._to_key = random_projection(self.num_features, KEY_LEN, seed + 1)

    @classmethod
    def of_model(cls, folder: Path, family: str, *, seed: int = 0) -> "TokenEmbeddings":
        """Load the embeddings of the model in this folder or GGUF file. Raises ModelError if its files hold none."""
        return cls(_gguf_embedding(folder) if is_gguf(folder) else _folder_embedding(folder, family), seed=seed)

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        """Ids beyond the vocabulary, which no tokenizer emits, count as the last one."""
        ids = np.minimum(np.array(window_of(prompt_token_ids), dtype=np.int64), len(self._rows) - 1)
        pooled = normalised(self._rows[ids].mean(axis=0))
        return PromptCode(pooled, normalised(pooled @ self._to_key))


def _gguf_embedding(path: Path) -> Rows:
    file = GgufFile(path)
    tensor = file.tensors.get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{path} holds no token embedding ({EMBEDDING}).")
    return unpack_rows(file.raw_rows(tensor), tensor.type.name)


def _folder_embedding(folder: Path, family: str) -> Rows:
    names, index = FAMILIES[family].names, WeightIndex(folder)
    for prefix in names.prefixes:
        name = f"{prefix}{names.embedding}.weight"
        location = index.location(name)
        if location is not None:
            return _read_rows(name, location)
    raise ModelError(f"{folder} holds no token embedding ({names.embedding}.weight).")


def _read_rows(name: str, location: TensorLocation) -> Rows:
    if location.dtype not in _DTYPES or len(location.shape) != 2:
        is_there = f"{location.dtype} {list(location.shape)}"
        raise ModelError(f"{location.path}: tensor {name} is {is_there}, expected rows of floats of 16 or 32 bits.")
    stored_dtype = np.dtype(_DTYPES[location.dtype])
    count = location.num_bytes // stored_dtype.itemsize
    stored = np.fromfile(location.path, stored_dtype, count, offset=location.offset).reshape(location.shape)
    if location.dtype == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)

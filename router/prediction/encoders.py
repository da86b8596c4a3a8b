"""Encodings of prompts for the length predictor: a vector for the regression, and a key for the search.

An encoder works on token ids, as a prompt reaches the router. It is a function of the prompt alone: the same ids always
give the same code.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.config import EMBEDDING
from alignedserve.runtime.model.weight_index import TensorLocation, WeightIndex
from kernels.block_values import unpack_rows
from kernels.cpu.length_prediction import hash_ngrams, is_native

Vector = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]

KEY_LEN = 128  # of every encoder: so small that a look-up compares all keys in time
WINDOW = 512  # tokens that an encoder reads of a prompt, half at each end: as many as ALISE's (BERT) does at most


class PromptCode(NamedTuple):
    """One encoded prompt. Both parts have Euclidean length 1, or 0 when there is nothing to tell prompts apart by."""

    features: Vector  # [num_features], read by the regression
    key: Vector  # [KEY_LEN], compared with those of finished requests by cosine


class PromptEncoder(Protocol):
    """Turns prompts into codes."""

    num_features: int
    least_similarity: float  # cosine of keys from which on two prompts count as similar; the scale is the encoder's own

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        """Return the code of a prompt of at least one token."""


class HashedNgrams:
    """Counts of single tokens and pairs, hashed with a sign into 1 024 places; the key is the same folded into 128.

    Needs no model and no download. Each count is replaced by its signed square root, so that a word said ten times
    weighs about three times as much as one said once.
    """

    num_features = 1024
    least_similarity = 0.65

    def __init__(self, *, allow_native: bool = True) -> None:
        """`allow_native`: by a native kernel where it is built, ten times as fast, with the same codes."""
        self._encode = self._natively if allow_native and is_native() else self._plainly

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        return self._encode(prompt_token_ids)

    def _natively(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        return PromptCode(*hash_ngrams(window_of(prompt_token_ids), self.num_features, KEY_LEN))

    def _plainly(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        ids = np.array(window_of(prompt_token_ids), dtype=np.uint64)
        hashes = np.concatenate((_mixed(ids + _SALT), _mixed(_mixed(ids[:-1]) * _ODD + ids[1:])))
        places = (hashes & np.uint64(self.num_features - 1)).astype(np.intp)
        signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
        counts = np.bincount(places, weights=signs, minlength=self.num_features)
        features = np.sign(counts) * np.sqrt(np.abs(counts))
        return PromptCode(normalised(features), normalised(features.reshape(-1, KEY_LEN).sum(axis=0)))


def window_of(prompt_token_ids: Sequence[int]) -> Sequence[int]:
    if len(prompt_token_ids) <= WINDOW:
        return prompt_token_ids
    return [*prompt_token_ids[: WINDOW // 2], *prompt_token_ids[-WINDOW // 2 :]]


def random_projection(num_from: int, num_to: int, seed: int) -> npt.NDArray[np.float32]:
    """Return a matrix [num_from, num_to] that keeps angles between vectors to within about 1 / sqrt(num_to)."""
    projection = np.random.default_rng(seed).standard_normal((num_from, num_to), dtype=np.float32)
    return projection / np.float32(num_to**0.5)


def normalised(vector: npt.NDArray[np.floating]) -> Vector:
    scaled: Vector = np.asarray(vector, dtype=np.float32) / np.float32(np.linalg.norm(vector) or 1.0)
    return scaled


_ODD = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits, as in SplitMix64, whose finaliser follows
_SALT = np.uint64(0x51ED270B)


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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

"""Encodings of prompts for the length predictor: a vector for the regression, and a key for the search.

An encoder works on token ids, as a prompt reaches the router. It is a function of the prompt alone: the same ids always
give the same code.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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
    """Return the first and last tokens of a prompt longer than WINDOW: the question is at one of its ends."""
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


# --- hashing ----------------------------------------------------------------------------------------------------------

_ODD = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits, as in SplitMix64, whose finaliser follows
_SALT = np.uint64(0x51ED270B)


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

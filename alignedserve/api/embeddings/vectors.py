"""Embeddings as vectors of length 1, in the forms in which responses carry them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.api.errors import GenerationFailed

Vectors = npt.NDArray[np.float32]


def unit_vectors(embeddings: Sequence[bytes], dimensions: int | None = None) -> Vectors:
    """Return embeddings, or the first `dimensions` of each, as rows of length 1 [texts, width].

    Raises GenerationFailed for one that has no direction.
    """
    rows = np.stack([np.frombuffer(embedding, "<f4") for embedding in embeddings])[:, :dimensions]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0.0).all()):
        raise GenerationFailed("The model computed an embedding that is not a direction.")
    unit: Vectors = rows / lengths
    return unit


def cosines(embeddings: Sequence[bytes], num_second: int) -> list[float]:
    """Return the cosine of each pair of texts, the second ones last; a single first one is paired with all.

    Raises GenerationFailed.
    """
    vectors = unit_vectors(embeddings)
    first, second = vectors[:-num_second], vectors[-num_second:]
    found: list[float] = np.einsum("ij,ij->i", *np.broadcast_arrays(first, second)).tolist()
    return found


def computed_scores(embeddings: Sequence[bytes]) -> list[float]:
    """Return what a cross-encoder computed of each pair."""
    return [float(np.frombuffer(embedding, "<f4")[0]) for embedding in embeddings]


def encoded(vector: Vectors, encoding_format: str) -> Any:
    """Return one vector as a list of numbers, or as base64 of its float32 bytes."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding_format == "base64" else vector.tolist()

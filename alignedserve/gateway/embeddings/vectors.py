"""Embeddings as vectors of length 1, in the forms in which responses carry them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.gateway.errors import GenerationFailed

Vectors = npt.NDArray[np.float32]


def unit_vectors(embeddings: Sequence[bytes]) -> Vectors:
    """Return embeddings as rows of length 1 [texts, width]. Raises GenerationFailed for one that has no direction."""
    rows = np.stack([np.frombuffer(embedding, "<f4") for embedding in embeddings])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0.0).all()):
        raise GenerationFailed("The model computed an embedding that is not a direction.")
    unit: Vectors = rows / lengths
    return unit


def encoded(vector: Vectors, encoding_format: str) -> Any:
    """Return one vector as a list of numbers, or as base64 of its float32 bytes."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding_format == "base64" else vector.tolist()

"""Formats what is computed from embeddings: vectors as OpenAI returns them, scores and rankings as vLLM does."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from alignedserve.api.embeddings.request_builder import RerankRequest
from alignedserve.api.errors import GenerationFailed
from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import encoded, extension_of

Vectors = npt.NDArray[np.float32]

ScoreReader = Callable[[Sequence[bytes]], list[float]]  # of what the workers computed, in the order of the requests


def unit_vectors(embeddings: Sequence[bytes], dimensions: int | None = None) -> Vectors:
    """Return embeddings, or the first `dimensions` of each, as rows of length 1 [texts, width]. Raises GenerationFailed
    for one that has no direction."""
    rows = np.stack([np.frombuffer(embedding, "<f4") for embedding in embeddings])[:, :dimensions]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0.0).all()):
        raise GenerationFailed("The model computed an embedding that is not a direction.")
    unit: Vectors = rows / lengths
    return unit


def cosines(embeddings: Sequence[bytes], num_second: int) -> list[float]:
    """Return the cosine of each pair of texts, the second ones last; a single first one is paired with all. Raises
    GenerationFailed."""
    vectors = unit_vectors(embeddings)
    first, second = vectors[:-num_second], vectors[-num_second:]
    products = np.einsum("ij,ij->i", *np.broadcast_arrays(first, second))
    clipped: list[float] = np.clip(products, -1.0, 1.0).tolist()  # rounding leads beyond a cosine
    return clipped


def computed_scores(embeddings: Sequence[bytes]) -> list[float]:
    """Return what a cross-encoder computed of each pair."""
    return [float(np.frombuffer(embedding, "<f4")[0]) for embedding in embeddings]


def encoded_vector(vector: Vectors, encoding_format: str) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding_format == "base64" else vector.tolist()


class EmbeddingFormatter:
    """Formats the body of /v1/embeddings."""

    def __init__(self, generation: Generation, encoding_format: str, dimensions: int | None = None) -> None:
        self._generation = generation
        self._encoding_format = encoding_format
        self._dimensions = dimensions

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        vectors = unit_vectors(self._generation.embeddings, self._dimensions)
        data = encoded(
            {"object": "embedding", "index": index, "embedding": encoded_vector(vector, self._encoding_format)}
            for index, vector in enumerate(vectors)
        )
        model, usage = self._generation.request.model, _usage(self._generation)
        body = {"object": "list", "data": data, "model": model, "usage": usage}
        return orjson.dumps(body | extension_of(self._generation))


class ScoreFormatter:
    """Formats the body of /v1/score."""

    def __init__(self, generation: Generation, read_scores: ScoreReader) -> None:
        self._generation = generation
        self._read_scores = read_scores

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        scores = self._read_scores(self._generation.embeddings)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        request = self._generation.request
        whole = {"id": request.response_id, "object": "list", "created": request.created, "model": request.model}
        whole |= {"data": data, "usage": _usage(self._generation)}
        return orjson.dumps(whole | extension_of(self._generation))


class RerankFormatter:
    """Formats the body of /v1/rerank."""

    def __init__(self, generation: Generation, read_scores: ScoreReader, body: RerankRequest) -> None:
        self._generation = generation
        self._read_scores = read_scores
        self._body = body

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        scores = self._read_scores(self._generation.embeddings)
        ranking = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [self._result(index, scores[index]) for index in ranking[: self._body.top_n or None]]
        request = self._generation.request
        whole = {"id": request.response_id, "model": request.model, "results": results}
        return orjson.dumps(whole | {"usage": _usage(self._generation)} | extension_of(self._generation))

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._body.return_documents:
            result["document"] = {"text": self._body.documents[index].text}
        return result


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]} | {
        "prompt_tokens_details": usage["prompt_tokens_details"]
    }

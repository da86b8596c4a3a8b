"""Formats what is computed from embeddings: vectors as OpenAI returns them, scores and rankings as vLLM does."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from alignedserve.api.embeddings.schemas import RerankRequest
from alignedserve.api.embeddings.vectors import encoded, unit_vectors
from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.openai.generation import Generation

ScoreReader = Callable[[Sequence[bytes]], list[float]]  # of what the workers computed, in the order of the requests


class EmbeddingFormatter:
    """Formats the body of /v1/embeddings."""

    def __init__(self, generation: Generation, encoding_format: str, dimensions: int | None = None) -> None:
        """`dimensions`: of the vectors' beginnings, which are returned instead; None: the whole."""
        self._generation = generation
        self._encoding_format = encoding_format
        self._dimensions = dimensions

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the whole response; see BodyFormatter."""
        vectors = unit_vectors(self._generation.embeddings, self._dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector, self._encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        model, usage = self._generation.request.model, _usage(self._generation)
        return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


class ScoreFormatter:
    """Formats the body of /v1/score."""

    def __init__(self, generation: Generation, read_scores: ScoreReader) -> None:
        self._generation = generation
        self._read_scores = read_scores

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the whole response; see BodyFormatter."""
        scores = self._read_scores(self._generation.embeddings)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        request = self._generation.request
        whole = {"id": request.response_id, "object": "list", "created": request.created, "model": request.model}
        return orjson.dumps(whole | {"data": data, "usage": _usage(self._generation)})


class RerankFormatter:
    """Formats the body of /v1/rerank."""

    def __init__(self, generation: Generation, read_scores: ScoreReader, asked: RerankRequest) -> None:
        self._generation = generation
        self._read_scores = read_scores
        self._asked = asked

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the whole response; see BodyFormatter."""
        scores = self._read_scores(self._generation.embeddings)
        ranking = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [self._result(index, scores[index]) for index in ranking[: self._asked.top_n]]
        request = self._generation.request
        whole = {"id": request.response_id, "model": request.model, "results": results}
        return orjson.dumps(whole | {"usage": _usage(self._generation)})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._asked.return_documents:
            result["document"] = {"text": self._asked.documents[index]}
        return result


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]} | {
        "prompt_tokens_details": usage["prompt_tokens_details"]
    }

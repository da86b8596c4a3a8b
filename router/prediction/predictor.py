"""ALISE's retrieval-based length predictor (section 3.1, Algorithm 1): search, else regress, else the mean.

docs/policies/length_prediction.md has the formula, the parameters and an example.
"""

import enum
from dataclasses import dataclass
from math import log1p
from typing import NamedTuple

import numpy as np

from alignedserve.core.request import Request, RequestClass
from router.prediction.encoders import PromptCode, PromptEncoder, Vector
from router.prediction.mlp import LengthMlp
from router.prediction.prior import LengthPrior
from router.prediction.store import REQUEST_BYTES, FinishedRequests


class PredictionSource(enum.Enum):
    """Source of a prediction."""

    RETRIEVAL = "retrieval"  # similar finished requests
    MLP = "mlp"  # no similar request has finished
    PRIOR = "prior"  # too few have finished for more than a mean


class Prediction(NamedTuple):
    """Expected output tokens of a request, from 1 (or its limit, if that is 0) to its limit."""

    output_len: float
    source: PredictionSource


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The paper names k and the threshold without values; the threshold is the encoder's."""

    num_neighbours: int = 8  # k
    capacity: int = 100_000  # finished requests that are kept
    max_bytes: int = 192 << 20  # of those and of what the MLP repeats, which takes a quarter at most
    fewest_learnt: int = 64  # requests before the MLP is used
    seed: int = 0


class LengthPredictor:
    """Learns from every finished request. The same calls in the same order give the same predictions."""

    def __init__(self, encoder: PromptEncoder, config: PredictorConfig | None = None) -> None:
        self._config = config or PredictorConfig()
        self._encoder = encoder
        max_bytes, seed = self._config.max_bytes, self._config.seed
        self._mlp = LengthMlp(num_features=encoder.num_features + _NUM_FACTS, max_bytes=max_bytes // 4, seed=seed)
        num_kept = max(1, (max_bytes - self._mlp.num_bytes) // REQUEST_BYTES)
        self._finished = FinishedRequests(capacity=min(self._config.capacity, num_kept), seed=seed)
        self._prior = LengthPrior()

    @property
    def num_bytes(self) -> int:
        """Bytes of what it has learnt from."""
        return self._mlp.num_bytes + self._finished.num_bytes

    @property
    def num_features(self) -> int:
        """Return the length of its prompts' features."""
        return self._encoder.num_features

    def encode(self, request: Request) -> PromptCode:
        """Encode the prompt for `predict` and `learn`; the slow part where the encoder is neural."""
        return self._encoder.encode(request.prompt_token_ids)

    def predict(self, request: Request, code: PromptCode) -> Prediction:
        """Predict the output length; changes no state."""
        similar = self._finished.search(
            code.key, num_wanted=self._config.num_neighbours, least_similarity=self._encoder.least_similarity
        )
        if len(similar.output_lens):
            mean = float(similar.similarities @ similar.output_lens / similar.similarities.sum())
            return Prediction(_within_limit(mean, request), PredictionSource.RETRIEVAL)
        if self._mlp.num_learnt >= self._config.fewest_learnt:
            expected = self._mlp.predict(_features(request, code))
            return Prediction(_within_limit(expected, request), PredictionSource.MLP)
        return Prediction(_within_limit(self._prior.predict(request), request), PredictionSource.PRIOR)

    def learn(self, request: Request, code: PromptCode, num_generated: int) -> None:
        """Learn from a request that finished after `num_generated` tokens."""
        self._finished.add(code.key, float(num_generated))
        self._mlp.learn(_features(request, code), float(num_generated))
        self._prior.observe(request, num_generated)


_NUM_FACTS = 3


def _features(request: Request, code: PromptCode) -> Vector:
    """Return the code, scaled to entries of about 1, and three facts about the request, of about 1 too."""
    num_coded = len(code.features)
    features = np.empty(num_coded + _NUM_FACTS, np.float32)
    np.multiply(code.features, np.float32(num_coded**0.5), out=features[:num_coded])
    is_real_time = request.request_class is RequestClass.REAL_TIME
    features[num_coded:] = (log1p(request.prompt_len) / 8.0, log1p(request.sampling.max_tokens) / 8.0, is_real_time)
    return features


def _within_limit(expected: float, request: Request) -> float:
    limit = float(request.sampling.max_tokens)
    return min(max(expected, 1.0), limit)

"""ALISE's retrieval-based length predictor (section 3.1, Algorithm 1): search, else regress, else the mean.

docs/policies/length_prediction.md has the formula, the parameters and an example.
"""

import enum
from dataclasses import dataclass
from math import log1p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.request import Request, RequestClass
from kernels.cpu.length_prediction import EPSILON, AdamState, can_descend, descend
from router.prediction.encoders import KEY_LEN, PromptCode, PromptEncoder, Vector
from router.request_registry import OutputLengthForecast

_LEARNING_RATE = 1e-3
# Earlier requests learnt with each new one: so few that BLAS computes the products on the calling thread. Its own
# threads wait for each other, for tens of milliseconds on a busy machine.
_NUM_REPEATED = 6
_BETA_1, _BETA_2 = 0.9, 0.999  # Adam's, as in its paper
_MAX_LOG_LEN = 20.0  # predictions are capped at e to this power

Array = npt.NDArray[np.float32]


class LengthMlp:
    """Features -> ReLU layer -> logarithm of the output length, fitted to squared error by Adam.

    The error of the logarithm is minimised, so that being wrong by a factor counts alike for short and long answers.
    Each finished request is learnt together with a few earlier ones, drawn at random from the last
    `memory`. Deterministic for a seed.
    """

    def __init__(
        self,
        *,
        num_features: int,
        num_hidden: int = 32,
        memory: int = 8192,
        max_bytes: int = 1 << 40,
        seed: int = 0,
        allow_native: bool = True,
    ) -> None:
        """`max_bytes`: of those requests. `allow_native`: by a native kernel where it is built, five times as fast,
        the same but for rounding."""
        self._rng = np.random.default_rng(seed)
        scale = (2.0 / num_features) ** 0.5
        parts = (
            (self._rng.standard_normal((num_features, num_hidden)) * scale).astype(np.float32).ravel(),
            np.zeros(2 * num_hidden + 1, np.float32),
        )
        parameters = np.concatenate(parts)
        memory = max(1, min(memory, max_bytes // (4 * num_features + 4)))
        self._adam = AdamState(parameters, np.zeros_like(parameters), np.zeros_like(parameters))
        self._weights, self._moments, self._squares = (_views(part, num_features, num_hidden) for part in self._adam)
        self._inputs: Array = np.zeros((memory, num_features), np.float32)
        self._targets: Array = np.zeros(memory, np.float32)
        self._is_native = allow_native and can_descend(num_hidden, _NUM_REPEATED + 1)
        self.num_learnt = 0

    @property
    def num_bytes(self) -> int:
        return self._inputs.nbytes + self._targets.nbytes

    def predict(self, features: Vector) -> float:
        hidden_weight, hidden_bias, out_weight, out_bias = self._weights
        hidden = np.maximum(features @ hidden_weight + hidden_bias, 0.0)
        return float(np.exp(np.clip(hidden @ out_weight + out_bias[0], 0.0, _MAX_LOG_LEN)))

    def learn(self, features: Vector, output_len: float) -> None:
        target = np.log(max(output_len, 1.0))
        if not self.num_learnt:
            self._weights[3][0] = target  # so that it has to learn only the difference
        row = self.num_learnt % len(self._targets)
        self._inputs[row], self._targets[row] = features, target
        self.num_learnt += 1
        batch = np.empty(_NUM_REPEATED + 1, np.int64)
        batch[0] = row
        batch[1:] = self._rng.integers(0, min(self.num_learnt, len(self._targets)), _NUM_REPEATED)
        rate = _LEARNING_RATE * (1 - _BETA_2**self.num_learnt) ** 0.5 / (1 - _BETA_1**self.num_learnt)
        if self._is_native:
            descend(self._adam, self._inputs, self._targets, batch, (rate, 1 - _BETA_1, 1 - _BETA_2))
        else:
            self._descend(self._inputs[batch], self._targets[batch], rate)

    def _descend(self, inputs: Array, targets: Array, rate: float) -> None:
        hidden_weight, hidden_bias, out_weight, out_bias = self._weights
        hidden = np.maximum(inputs @ hidden_weight + hidden_bias, 0.0)
        errors = (hidden @ out_weight + out_bias - targets) * np.float32(2.0 / len(targets))
        back = np.outer(errors, out_weight) * (hidden > 0)
        gradients = (inputs.T @ back, back.sum(axis=0), hidden.T @ errors, errors.sum(keepdims=True))
        for weight, moment, square, gradient in zip(
            self._weights, self._moments, self._squares, gradients, strict=True
        ):
            moment += (1 - _BETA_1) * (gradient - moment)
            square += (1 - _BETA_2) * (gradient * gradient - square)
            weight -= np.float32(rate) * moment / (np.sqrt(square) + EPSILON)


def _views(part: Array, num_features: int, num_hidden: int) -> tuple[Array, Array, Array, Array]:
    end = num_features * num_hidden
    return (
        part[:end].reshape(num_features, num_hidden),
        part[end : end + num_hidden],
        part[end + num_hidden : end + 2 * num_hidden],
        part[end + 2 * num_hidden :],
    )


_REQUEST_BYTES = 4 * KEY_LEN + 4  # a key and an output length, both in float32


class PredictionSource(enum.Enum):
    """Source of a prediction."""

    RETRIEVAL = "retrieval"  # similar finished requests
    MLP = "mlp"  # no similar request has finished
    PRIOR = "prior"  # too few have finished for more than a mean


class LengthPrediction(NamedTuple):
    """Expected output tokens of a request, from 1 (or its limit, if that is 0) to its limit."""

    output_len: float
    source: PredictionSource


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The paper names k and the threshold without values; the threshold is the encoder's."""

    num_neighbours: int = 8  # k
    capacity: int = 20_000  # finished requests that are kept and compared; a look-up compares all of them
    max_bytes: int = 192 << 20  # of those and of what the MLP repeats, which takes a quarter at most
    fewest_learnt: int = 64  # requests before the MLP is used
    seed: int = 0


class Neighbours(NamedTuple):
    """Similar finished requests, most similar first."""

    similarities: Vector
    output_lens: Vector


class FinishedRequests:
    """Keys and output lengths of at most `capacity` finished requests; the newest replaces the oldest."""

    def __init__(self, *, capacity: int) -> None:
        assert capacity > 0, "a store of nothing"
        self._keys = np.zeros((capacity, KEY_LEN), np.float32)
        self._output_lens = np.zeros(capacity, np.float32)
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._keys))

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._output_lens.nbytes

    def add(self, key: Vector, output_len: float) -> None:
        slot = self._num_added % len(self._keys)
        self._keys[slot], self._output_lens[slot] = key, output_len
        self._num_added += 1

    def search(self, key: Vector, *, num_wanted: int, least_similarity: float) -> Neighbours:
        # Not a matrix product: BLAS's threads wait for each other, for tens of milliseconds on a busy machine.
        similarities = np.vecdot(self._keys[: len(self)], key)
        similar = (similarities >= least_similarity).nonzero()[0]
        if len(similar) > num_wanted:
            similar = similar[np.argpartition(-similarities[similar], num_wanted - 1)[:num_wanted]]
        similar = similar[np.argsort(-similarities[similar], kind="stable")]
        return Neighbours(similarities[similar], self._output_lens[similar])


class LengthPrior:
    """Mean output length per request class and power of two of the prompt length, for as long as little has finished.

    Falls back to the mean of the class, and to the request's own limit while no request of its class has finished.
    """

    def __init__(self) -> None:
        self._by_class = OutputLengthForecast()
        self._by_length: dict[tuple[RequestClass, int], OutputLengthForecast] = {}

    def predict(self, request: Request) -> float:
        return self._by_length.get(_kind(request), self._by_class).predict(request)

    def observe(self, request: Request, num_generated: int) -> None:
        self._by_class.observe(request, num_generated)
        self._by_length.setdefault(_kind(request), OutputLengthForecast()).observe(request, num_generated)


class LengthPredictor:
    """Learns from every finished request. The same calls in the same order give the same predictions."""

    def __init__(self, encoder: PromptEncoder, config: PredictorConfig | None = None) -> None:
        self._config = config or PredictorConfig()
        self._encoder = encoder
        max_bytes, seed = self._config.max_bytes, self._config.seed
        self._mlp = LengthMlp(num_features=encoder.num_features + _NUM_FACTS, max_bytes=max_bytes // 4, seed=seed)
        num_kept = max(1, (max_bytes - self._mlp.num_bytes) // _REQUEST_BYTES)
        self._finished = FinishedRequests(capacity=min(self._config.capacity, num_kept))
        self._prior = LengthPrior()

    @property
    def num_bytes(self) -> int:
        return self._mlp.num_bytes + self._finished.num_bytes

    @property
    def num_features(self) -> int:
        return self._encoder.num_features

    def encode(self, request: Request) -> PromptCode:
        return self._encoder.encode(request.prompt_token_ids)

    def predict(self, request: Request, code: PromptCode) -> LengthPrediction:
        similar = self._finished.search(
            code.key, num_wanted=self._config.num_neighbours, least_similarity=self._encoder.least_similarity
        )
        if len(similar.output_lens):
            mean = float(similar.similarities @ similar.output_lens / similar.similarities.sum())
            return LengthPrediction(_within_limit(mean, request), PredictionSource.RETRIEVAL)
        if self._mlp.num_learnt >= self._config.fewest_learnt:
            expected = self._mlp.predict(_features(request, code))
            return LengthPrediction(_within_limit(expected, request), PredictionSource.MLP)
        return LengthPrediction(_within_limit(self._prior.predict(request), request), PredictionSource.PRIOR)

    def learn(self, request: Request, code: PromptCode, num_generated: int) -> None:
        self._finished.add(code.key, float(num_generated))
        self._mlp.learn(_features(request, code), float(num_generated))
        self._prior.observe(request, num_generated)


_NUM_FACTS = 3


def _features(request: Request, code: PromptCode) -> Vector:
    num_coded = len(code.features)
    features = np.empty(num_coded + _NUM_FACTS, np.float32)
    np.multiply(code.features, np.float32(num_coded**0.5), out=features[:num_coded])
    is_real_time = request.is_real_time
    features[num_coded:] = (log1p(request.prompt_len) / 8.0, log1p(request.sampling.max_tokens) / 8.0, is_real_time)
    return features


def _within_limit(expected: float, request: Request) -> float:
    limit = float(request.sampling.max_tokens)
    return min(max(expected, 1.0), limit)


def _kind(request: Request) -> tuple[RequestClass, int]:
    return request.request_class, request.prompt_len.bit_length()

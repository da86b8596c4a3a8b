"""Simpler ways to foresee output lengths, to compare the router's predictor with. Each is made from what it learns."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.microbench.predictor.texts import Answered
from router.prediction.encoders import HashedNgrams

NUM_BUCKETS = 10
_EPOCHS, _BATCH, _RATE = 20, 64, 1.0

Floats = npt.NDArray[np.float64]


class Baseline(Protocol):
    """Predictor of the length of one answer."""

    def predict(self, answered: Answered) -> float:
        """Predict the output tokens, without looking at the answer itself."""


class MeanLength:
    """The mean, whatever is asked."""

    def __init__(self, learnt: Sequence[Answered]) -> None:
        self._mean = float(np.mean([one.output_len for one in learnt]))

    def predict(self, answered: Answered) -> float:
        """See Baseline."""
        return self._mean


class PromptLengthRegression:
    """A straight line through the logarithms of prompt and output length, by least squares."""

    def __init__(self, learnt: Sequence[Answered]) -> None:
        lengths = np.log1p([one.request.prompt_len for one in learnt])
        self._slope, self._offset = np.polyfit(lengths, np.log([one.output_len for one in learnt]), 1)

    def predict(self, answered: Answered) -> float:
        """See Baseline."""
        return float(np.exp(self._offset + self._slope * np.log1p(answered.request.prompt_len)))


class ProxyClassifier:
    """The proxy-based predictor of the paper's comparison, made small: a classifier of the prompt into length buckets.

    A softmax over the hashed n-grams, trained in epochs over everything learnt, as proxies are: ahead, not online. The
    buckets divide the range of lengths evenly; a prompt is expected to be as long as the mean of its bucket.
    """

    def __init__(self, learnt: Sequence[Answered], seed: int = 0) -> None:
        self._encoder = HashedNgrams()
        lengths = np.array([one.output_len for one in learnt], dtype=np.float64)
        buckets = bucket_of(lengths, lengths.max())
        sums = np.bincount(buckets, weights=lengths, minlength=NUM_BUCKETS)
        self._mean_of = sums / np.maximum(np.bincount(buckets, minlength=NUM_BUCKETS), 1)
        features = np.stack([self._features(one) for one in learnt])
        self._weights = np.zeros((features.shape[1], NUM_BUCKETS))
        rng = np.random.default_rng(seed)
        for _ in range(_EPOCHS):
            order = rng.permutation(len(learnt))
            for begin in range(0, len(order), _BATCH):
                self._descend(features[order[begin : begin + _BATCH]], buckets[order[begin : begin + _BATCH]])

    def predict(self, answered: Answered) -> float:
        """See Baseline."""
        return float(self._mean_of[int(np.argmax(self._features(answered) @ self._weights))])

    def _features(self, one: Answered) -> Floats:
        facts = (np.log1p(one.request.prompt_len) / 8.0, 1.0)
        return np.concatenate((self._encoder.encode(one.request.prompt_token_ids).features, facts), dtype=np.float64)

    def _descend(self, features: Floats, buckets: npt.NDArray[np.int64]) -> None:
        scores = features @ self._weights
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors = odds / odds.sum(axis=1, keepdims=True)
        errors[np.arange(len(buckets)), buckets] -= 1.0
        self._weights -= _RATE * features.T @ errors / len(buckets)


def bucket_of(lengths: Floats, longest: float) -> npt.NDArray[np.int64]:
    """Return each length's bucket of NUM_BUCKETS even ones up to `longest`; longer ones are in the last."""
    return np.minimum(lengths * NUM_BUCKETS / longest, NUM_BUCKETS - 1).astype(np.int64)

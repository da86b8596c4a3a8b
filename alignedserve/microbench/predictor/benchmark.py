"""Accuracy and speed of predicting output lengths: the router's predictor against simpler ways, without any engine.

ALISE's Table 2 counts a prediction as accurate when it lies in the same of evenly divided bins as the true length, and
gives an average prediction error and a latency. It says neither how many bins there are nor what the error is divided
by: here there are ten up to the longest answer learnt, and the error is given by all three that it could be.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.metrics import percentile
from alignedserve.core.request import Request
from alignedserve.microbench.predictor.baselines import (
    NUM_BUCKETS,
    Floats,
    MeanLength,
    PromptLengthRegression,
    ProxyClassifier,
    bucket_of,
)
from alignedserve.microbench.predictor.texts import Answered, Corpus, pocket_corpus, read_corpus
from alignedserve.runtime.model.served_model import resolve_model
from router.prediction.encoders import HashedNgrams, PromptEncoder
from router.prediction.predictor import LengthPredictor, PredictionSource
from router.prediction.token_embeddings import TokenEmbeddings

_NUM_TIMED = 500
_MAX_STORED = 1_000_000

OnDone = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PredictorBenchmarkSpec:
    """Parameters of the benchmark. Raises ConfigError naming the field."""

    texts: tuple[Path, ...] = ()  # none: the tasks that ship with the package
    stored_sizes: tuple[int, ...] = (100, 10_000, 20_000)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.stored_sizes or not all(1 <= size <= _MAX_STORED for size in self.stored_sizes):
            raise ConfigError(f"stored sizes must lie between 1 and {_MAX_STORED}.")

    @property
    def num_steps(self) -> int:
        """Return the number of calls of `on_done`."""
        return 5 * max(len(self.texts), 1) + len(self.stored_sizes)


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """One way to predict on one corpus. Every field is plain JSON."""

    corpus: str
    predictor: str
    num_learnt: int
    num_tested: int
    bucket_accuracy: float  # share in the right one of ten even buckets
    error_of_range: float  # mean absolute error, by the longest answer learnt
    error_of_mean: float  # the same, by the mean answer tested
    relative_error: float  # mean of each error by its own answer
    rank_correlation: float | None  # Spearman's; None where all predictions are equal
    share_retrieved: float | None = None  # of predictions from similar requests; None where nothing is retrieved
    retrieved_accuracy: float | None = None  # bucket accuracy of those
    retrieved_error_of_mean: float | None = None


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """One request at one size of the store, in microseconds."""

    num_stored: int
    encode_p50_us: float
    predict_p50_us: float  # without encoding
    predict_p99_us: float
    encode_and_predict_p50_us: float
    update_p50_us: float
    update_p99_us: float


@dataclass(frozen=True, slots=True)
class PredictorBenchmarkResult:
    """Measured figures."""

    num_buckets: int
    accuracy: tuple[AccuracyFigures, ...]
    speed: tuple[SpeedFigures, ...]


def run_predictor_benchmark(spec: PredictorBenchmarkSpec, on_done: OnDone) -> PredictorBenchmarkResult:
    """Measure every predictor on every corpus, then the speed of the default one. Takes about a minute.

    `on_done` is told what has been measured, after each part. Raises ConfigError where a file of texts is malformed.
    """
    corpora = [read_corpus(path, spec.seed) for path in spec.texts] or [pocket_corpus(spec.seed)]
    accuracy = tuple(row for corpus in corpora for row in _accuracies(corpus, on_done))
    return PredictorBenchmarkResult(NUM_BUCKETS, accuracy, _speeds(corpora[0], spec, on_done))


# --- accuracy ---------------------------------------------------------------------------------------------------------


def _accuracies(corpus: Corpus, on_done: OnDone) -> list[AccuracyFigures]:
    rows = []
    served = resolve_model(ModelSectionConfig())
    embeddings = TokenEmbeddings.of_model(served.folder, served.decoder.family)
    in_model_ids = replace(corpus, learnt=_in_model_ids(corpus.learnt), tested=_in_model_ids(corpus.tested))
    for name, encoder, texts in (
        ("hashed_ngrams", HashedNgrams(), corpus),
        ("token_embeddings", embeddings, in_model_ids),
    ):
        rows.append(_retrieval(name, encoder, texts))
        on_done(f"{corpus.name}, {name}")
    for name, make in (
        ("mean", MeanLength),
        ("prompt_length_regression", PromptLengthRegression),
        ("proxy_classifier", ProxyClassifier),
    ):
        baseline = make(corpus.learnt)
        rows.append(_judged(corpus, name, np.array([baseline.predict(one) for one in corpus.tested])))
        on_done(f"{corpus.name}, {name}")
    return rows


def _in_model_ids(answered: Sequence[Answered]) -> list[Answered]:
    """Return the same prompts in the tokens whose embeddings are pooled."""
    return [replace(one, request=replace(one.request, prompt_token_ids=one.model_ids)) for one in answered]


def _retrieval(name: str, encoder: PromptEncoder, corpus: Corpus) -> AccuracyFigures:
    predictor = LengthPredictor(encoder)
    for one in corpus.learnt:
        predictor.learn(one.request, predictor.encode(one.request), one.output_len)
    predictions = [predictor.predict(one.request, predictor.encode(one.request)) for one in corpus.tested]
    is_retrieved = np.array([prediction.source is PredictionSource.RETRIEVAL for prediction in predictions])
    predicted = np.array([prediction.output_len for prediction in predictions])
    figures = replace(_judged(corpus, name, predicted), share_retrieved=float(is_retrieved.mean()))
    if not is_retrieved.any():
        return figures
    tested = [one for one, is_one in zip(corpus.tested, is_retrieved, strict=True) if is_one]
    retrieved = _judged(replace(corpus, tested=tested), name, predicted[is_retrieved])
    return replace(
        figures, retrieved_accuracy=retrieved.bucket_accuracy, retrieved_error_of_mean=retrieved.error_of_mean
    )


def _judged(corpus: Corpus, name: str, predicted: Floats) -> AccuracyFigures:
    actual = np.array([one.output_len for one in corpus.tested], dtype=np.float64)
    longest = float(max(one.output_len for one in corpus.learnt))
    errors = np.abs(predicted - actual)
    return AccuracyFigures(
        corpus=corpus.name,
        predictor=name,
        num_learnt=len(corpus.learnt),
        num_tested=len(corpus.tested),
        bucket_accuracy=float((bucket_of(predicted, longest) == bucket_of(actual, longest)).mean()),
        error_of_range=float(errors.mean() / longest),
        error_of_mean=float(errors.mean() / actual.mean()),
        relative_error=float((errors / actual).mean()),
        rank_correlation=rank_correlation(predicted, actual),
    )


def rank_correlation(some: Floats, others: Floats) -> float | None:
    """Return Spearman's correlation of ranks, equal values sharing their mean rank; None where all of one are equal."""
    ranks, other_ranks = _ranks(some), _ranks(others)
    if ranks.std() == 0.0 or other_ranks.std() == 0.0:
        return None
    return float(np.corrcoef(ranks, other_ranks)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks: Floats = (ends - (counts + 1) / 2.0)[group]
    return mean_ranks


# --- speed ------------------------------------------------------------------------------------------------------------


def _speeds(corpus: Corpus, spec: PredictorBenchmarkSpec, on_done: OnDone) -> tuple[SpeedFigures, ...]:
    """Return the default predictor, filled with prompts of the corpus, each with a word of its own at the end."""
    predictor, rows = LengthPredictor(HashedNgrams()), []
    rng = np.random.default_rng(spec.seed)
    num_stored = 0
    for size in sorted(spec.stored_sizes):
        update_us: list[float] = []
        while num_stored < size:
            one = corpus.learnt[num_stored % len(corpus.learnt)]
            request = _varied(one.request, rng)
            code = predictor.encode(request)
            update_us.append(_microseconds(partial(predictor.learn, request, code, one.output_len)))
            num_stored += 1
        rows.append(_speed(predictor, size, [_varied(one.request, rng) for one in corpus.tested], update_us))
        on_done(f"{size} stored")
    return tuple(rows)


def _speed(
    predictor: LengthPredictor, num_stored: int, requests: list[Request], update_us: list[float]
) -> SpeedFigures:
    encode_us, predict_us, both_us = [], [], []
    for request in (requests * (_NUM_TIMED // len(requests) + 1))[:_NUM_TIMED]:
        code = predictor.encode(request)
        encode_us.append(_microseconds(partial(predictor.encode, request)))
        predict_us.append(_microseconds(partial(predictor.predict, request, code)))
        both_us.append(encode_us[-1] + predict_us[-1])
    return SpeedFigures(
        num_stored=num_stored,
        encode_p50_us=percentile(sorted(encode_us), 50),
        predict_p50_us=percentile(sorted(predict_us), 50),
        predict_p99_us=percentile(sorted(predict_us), 99),
        encode_and_predict_p50_us=percentile(sorted(both_us), 50),
        update_p50_us=percentile(sorted(update_us), 50),
        update_p99_us=percentile(sorted(update_us), 99),
    )


def _varied(request: Request, rng: np.random.Generator) -> Request:
    word = int(rng.integers(1, 1 << 31))
    return replace(request, prompt_token_ids=(*request.prompt_token_ids, word))


def _microseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e3

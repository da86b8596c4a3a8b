"""Output lengths foreseen by the router's predictor, beside the mean of what it has learnt, and its microseconds.

    python -m benchmarks.scheduling.predictor [--texts FILE ...]  # target: 500 us with 20 000 requests stored

Without files the tasks of the pocket model are foreseen. A file has JSON lines (`.gz` too) with `prompt` and
`response`, or `instruction`, `input` and `output`; its tokens are words and punctuation marks, by their checksum, as no
tokenizer belongs to it. Four fifths are learnt, one is tested. ALISE's Table 2 counts a prediction as accurate when it
lies in the same of evenly divided bins as the true length: here there are ten up to the longest answer learnt.
"""

import gzip
import json
import random
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import RequestId
from alignedserve.core.metrics import percentile
from alignedserve.core.request import Request, SamplingParams
from alignedserve.pocket.tasks import OFFERED_SKILLS, make_task
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from router.prediction.encoders import HashedNgrams
from router.prediction.predictor import LengthPredictor, PredictionSource

Floats = npt.NDArray[np.float64]

STORED_SIZES = (100, 10_000, 20_000)
NUM_BUCKETS, NUM_TASKS, NUM_TIMED = 10, 6000, 500
MAX_TOKENS = 4096  # limit of every request: no answer is cut off by it
_PIECE = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and how many tokens its answer had."""

    request: Request
    output_len: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Answered requests in an order of their own, to learn from and to test with."""

    name: str
    learnt: Sequence[Answered]
    tested: Sequence[Answered]


def pocket_corpus(seed: int, num_tasks: int = NUM_TASKS) -> Corpus:
    tokenizer, rng = Tokenizer.load(pocket_folder()), random.Random(seed)
    tasks = [make_task(rng.choice(OFFERED_SKILLS), rng) for _ in range(num_tasks)]
    prompts = [tuple(tokenizer.encode(task.prompt)) for task in tasks]
    lengths = [len(tokenizer.encode(task.answer, add_special_tokens=False)) + 1 for task in tasks]
    return _split("pocket", list(zip(prompts, lengths, strict=True)), seed)


def read_corpus(path: Path, seed: int) -> Corpus:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = []
    for fields in map(json.loads, filter(bytes.strip, content.splitlines())):
        prompt, answer = ("prompt", "response") if "prompt" in fields else ("instruction", "output")
        text = f"{fields[prompt]}\n{fields.get('input', '')}".strip()
        ids = tuple(zlib.crc32(piece.lower().encode()) >> 1 for piece in _PIECE.findall(text)) or (0,)
        rows.append((ids, max(len(_PIECE.findall(fields[answer])), 1)))
    return _split(path.name.partition(".")[0], rows, seed)


def _split(name: str, rows: list[tuple[tuple[int, ...], int]], seed: int) -> Corpus:
    random.Random(seed).shuffle(rows)
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    answered = [
        Answered(Request(RequestId(str(index)), ids, sampling, "", 0.0), output_len)
        for index, (ids, output_len) in enumerate(rows)
    ]
    num_learnt = len(answered) * 4 // 5
    return Corpus(name, answered[:num_learnt], answered[num_learnt:])


def accuracies(corpus: Corpus) -> list[dict[str, Any]]:
    predictor = LengthPredictor(HashedNgrams())
    for one in corpus.learnt:
        predictor.learn(one.request, predictor.encode(one.request), one.output_len)
    predictions = [predictor.predict(one.request, predictor.encode(one.request)) for one in corpus.tested]
    retrieved = [prediction.source is PredictionSource.RETRIEVAL for prediction in predictions]
    foreseen = np.array([prediction.output_len for prediction in predictions])
    mean = float(np.mean([one.output_len for one in corpus.learnt]))
    return [
        {**_judged(corpus, "hashed_ngrams", foreseen), "share_retrieved": round(float(np.mean(retrieved)), 3)},
        _judged(corpus, "mean", np.full(len(corpus.tested), mean)),
    ]


def _judged(corpus: Corpus, name: str, predicted: Floats) -> dict[str, Any]:
    actual = np.array([one.output_len for one in corpus.tested], dtype=np.float64)
    longest = float(max(one.output_len for one in corpus.learnt))
    error = float(np.abs(predicted - actual).mean())
    correlation = rank_correlation(predicted, actual)
    return {
        "corpus": corpus.name,
        "predictor": name,
        "num_learnt": len(corpus.learnt),
        "num_tested": len(corpus.tested),
        "bucket_accuracy": round(float((bucket_of(predicted, longest) == bucket_of(actual, longest)).mean()), 3),
        "error_of_range": round(error / longest, 3),
        "error_of_mean": round(error / float(actual.mean()), 3),
        "rank_correlation": correlation and round(correlation, 3),
    }


def bucket_of(lengths: Floats, longest: float) -> npt.NDArray[np.int64]:
    """Return each length's bucket of NUM_BUCKETS even ones up to `longest`; longer ones are in the last."""
    return np.minimum(lengths * NUM_BUCKETS / longest, NUM_BUCKETS - 1).astype(np.int64)


def rank_correlation(some: Floats, others: Floats) -> float | None:
    """Return Spearman's correlation of ranks, equal values sharing their mean rank; None where all of one are equal."""
    ranks, other_ranks = _ranks(some), _ranks(others)
    if ranks.std() == 0.0 or other_ranks.std() == 0.0:
        return None
    return float(np.corrcoef(ranks, other_ranks)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: Floats = (np.cumsum(counts) - (counts + 1) / 2.0)[group]
    return mean_ranks


def speeds(corpus: Corpus, sizes: Sequence[int], seed: int = 0) -> list[dict[str, float]]:
    predictor, rng, rows = LengthPredictor(HashedNgrams()), np.random.default_rng(seed), []
    num_stored = 0
    for size in sizes:
        learn_us = []
        for number in range(num_stored, size):
            one = corpus.learnt[number % len(corpus.learnt)]
            request = _varied(one.request, rng)
            learn_us.append(_microseconds(partial(predictor.learn, request, predictor.encode(request), one.output_len)))
        num_stored = size
        foreseen_us = []
        for number in range(NUM_TIMED):
            request = _varied(corpus.tested[number % len(corpus.tested)].request, rng)
            foreseen_us.append(_microseconds(partial(_foresee, predictor, request)))
        rows.append({"num_stored": size, **_percentiles("predict", foreseen_us), **_percentiles("learn", learn_us)})
    return rows


def _foresee(predictor: LengthPredictor, request: Request) -> None:
    predictor.predict(request, predictor.encode(request))


def _varied(request: Request, rng: np.random.Generator) -> Request:
    return replace(request, prompt_token_ids=(*request.prompt_token_ids, int(rng.integers(1, 1 << 31))))


def _microseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e3


def _percentiles(name: str, times_us: list[float]) -> dict[str, float]:
    return {f"{name}_p{q}_us": round(percentile(sorted(times_us), q), 1) for q in (50, 99)}


def main() -> None:
    """Measure; print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    files = parser.parse_args().texts
    own = pocket_corpus(seed=0)
    accuracy = [row for corpus in (own, *(read_corpus(path, 0) for path in files)) for row in accuracies(corpus)]
    speed = speeds(own, STORED_SIZES)
    for row in (*accuracy, *speed):
        print(row)
    figures = {"num_buckets": NUM_BUCKETS, "accuracy": accuracy, "speed": speed}
    print(write_result("scheduling/predictor", figures))


if __name__ == "__main__":
    main()

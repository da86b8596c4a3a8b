"""The predictor's benchmark on small corpora."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling.predictor import accuracies, bucket_of, pocket_corpus, rank_correlation, read_corpus, speeds


def write_texts(path: Path, num_texts: int) -> Path:
    """Write two kinds of questions; the one is answered in three words, the other in thirty."""
    rows = [
        {"prompt": f"say yes {number}", "response": "yes it is"}
        if number % 2
        else {"instruction": "tell a long story", "input": f"of {number}", "output": "once " * 30}
        for number in range(num_texts)
    ]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    return path


def test_what_can_be_foreseen_is_and_the_mean_says_nothing(tmp_path: Path) -> None:
    corpus = read_corpus(write_texts(tmp_path / "two_kinds.jsonl.gz", 200), 0)
    predicted, mean = accuracies(corpus)
    assert predicted["corpus"] == "two_kinds"
    assert predicted["bucket_accuracy"] == 1.0
    assert predicted["rank_correlation"] == pytest.approx(1.0, abs=0.2)
    assert mean["rank_correlation"] is None
    assert (mean["num_learnt"], mean["num_tested"]) == (160, 40)
    assert [row["num_stored"] for row in speeds(corpus, (10, 50))] == [10, 50]


def test_nothing_is_learnt_that_is_tested_and_the_split_is_seeded() -> None:
    corpus, again, other = (pocket_corpus(seed, num_tasks=500) for seed in (3, 3, 4))
    learnt = {one.request.request_id for one in corpus.learnt}
    assert not learnt & {one.request.request_id for one in corpus.tested}
    assert again.tested == corpus.tested
    assert other.tested != corpus.tested


def test_ranks_correlate_whatever_the_scale() -> None:
    values = np.array([1.0, 2.0, 2.0, 5.0])
    assert rank_correlation(values, values**3) == pytest.approx(1.0)
    assert rank_correlation(values, -values) == pytest.approx(-1.0)
    assert rank_correlation(values, np.ones(4)) is None


def test_buckets_divide_the_range_evenly() -> None:
    assert bucket_of(np.array([0.0, 9.9, 10.0, 99.0, 100.0, 250.0]), 100.0).tolist() == [0, 0, 1, 9, 9, 9]

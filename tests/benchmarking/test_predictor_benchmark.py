"""The predictor's benchmark on small corpora, and the files it takes."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.microbench.predictor.baselines import bucket_of
from alignedserve.microbench.predictor.benchmark import (
    PredictorBenchmarkSpec,
    rank_correlation,
    run_predictor_benchmark,
)
from alignedserve.microbench.predictor.texts import pocket_corpus, read_corpus


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


def test_every_predictor_is_measured_on_every_corpus_and_what_can_be_foreseen_is(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "two_kinds.jsonl.gz", 200)
    parts: list[str] = []
    spec = PredictorBenchmarkSpec(texts=(texts,), stored_sizes=(10, 50))
    result = run_predictor_benchmark(spec, parts.append)
    assert len(parts) == spec.num_steps
    by_name = {row.predictor: row for row in result.accuracy}
    assert {row.corpus for row in result.accuracy} == {"two_kinds"}
    assert by_name["hashed_ngrams"].bucket_accuracy == by_name["proxy_classifier"].bucket_accuracy == 1.0
    assert by_name["hashed_ngrams"].rank_correlation == pytest.approx(1.0, abs=0.2)
    assert by_name["mean"].rank_correlation is None
    assert (by_name["mean"].num_learnt, by_name["mean"].num_tested) == (160, 40)
    assert [row.num_stored for row in result.speed] == [10, 50]


def test_nothing_is_learnt_that_is_tested_and_the_split_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.microbench.predictor.texts._NUM_TASKS", 500)
    corpus, again, other = (pocket_corpus(seed=seed) for seed in (3, 3, 4))
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: needs the texts prompt and response"),
        ('{"prompt": "a"}', "line 2: needs the texts"),
        ('{"instruction": "a", "output": 5}', "line 2: needs the texts"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=problem):
        read_corpus(path, 0)


def test_a_file_that_is_missing_or_too_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_corpus(tmp_path / "none.jsonl", 0)
    with pytest.raises(ConfigError, match="50 texts are too few"):
        read_corpus(write_texts(tmp_path / "few.jsonl.gz", 50), 0)


def test_sizes_of_the_store_are_bounded() -> None:
    with pytest.raises(ConfigError, match="stored sizes"):
        PredictorBenchmarkSpec(stored_sizes=(0,))

"""Output lengths foreseen: the router's predictor against simpler ways, and its microseconds.

    python -m benchmarks.scheduling.predictor --data FOLDER  # target: 500 us with 20 000 requests stored

Without a folder (or ALIGNEDSERVE_DATA) only the tasks that ship with the package are measured. With one, its Alpaca and
ShareGPT texts as well.
"""

import argparse
import os
from dataclasses import asdict
from pathlib import Path

from alignedserve.microbench.predictor.benchmark import PredictorBenchmarkSpec, run_predictor_benchmark
from benchmarks.support.recording import write_result

_TEXTS = ("alpaca_12k.jsonl.gz", "sharegpt_first_turn_text.jsonl.gz")


def main() -> None:
    """Measure; print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("ALIGNEDSERVE_DATA"))
    folder = parser.parse_args().data
    texts = tuple(Path(folder) / name for name in _TEXTS) if folder else ()
    own = run_predictor_benchmark(PredictorBenchmarkSpec(), print)
    accuracy = list(own.accuracy)
    if texts:
        accuracy += run_predictor_benchmark(PredictorBenchmarkSpec(texts=texts, stored_sizes=(100,)), print).accuracy
    for row in (*accuracy, *own.speed):
        print(row)
    figures = {"num_buckets": own.num_buckets, "accuracy": accuracy, "speed": own.speed}
    write_result("predictor", {**figures, "accuracy": _rounded(accuracy), "speed": _rounded(own.speed)})


def _rounded(rows: object) -> list[dict[str, object]]:
    assert isinstance(rows, (list, tuple)), "rows of figures"
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()}
        for row in rows
    ]


if __name__ == "__main__":
    main()

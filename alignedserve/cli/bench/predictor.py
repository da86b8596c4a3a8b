"""`alignedserve bench predictor`: how well and how fast output lengths are predicted."""

from dataclasses import asdict

from alignedserve.cli.bench.options import PredictorOptions
from alignedserve.cli.console import progress, results, write_json
from alignedserve.loadgen.prompts import to_json
from alignedserve.microbench.predictor.benchmark import PredictorBenchmarkSpec, run_predictor_benchmark
from alignedserve.microbench.tables import print_records

# Of the accuracy figures; --json has all of them.
_SHOWN = (
    *("corpus", "predictor", "bucket_accuracy", "error_of_range", "error_of_mean", "relative_error"),
    *("rank_correlation", "share_retrieved"),
)
_STORED_SIZES = (100, 10_000, 20_000)


def bench_predictor(options: PredictorOptions) -> int:
    """Run the command and return its exit code."""
    spec = PredictorBenchmarkSpec(texts=options.texts, stored_sizes=options.stored or _STORED_SIZES, seed=options.seed)
    with progress() as bar:
        task = bar.add_task("predictor", total=spec.num_steps, status="")
        result = run_predictor_benchmark(spec, lambda part: bar.update(task, advance=1, status=part))
    if options.json_output:
        write_json(to_json(result), "-")
        return 0
    shown = [{name: value for name, value in asdict(row).items() if name in _SHOWN} for row in result.accuracy]
    print_records(results(), shown, title="output lengths foreseen")
    print_records(results(), [asdict(row) for row in result.speed], title="hashed_ngrams, microseconds")
    return 0

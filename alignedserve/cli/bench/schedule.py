"""`alignedserve bench schedule`: the pool's index and its batch formers alone."""

from dataclasses import asdict

from alignedserve.cli.bench.options import ScheduleOptions
from alignedserve.cli.console import notes, results, write_json
from alignedserve.loadgen.prompts import to_json
from alignedserve.microbench.scheduling.benchmark import (
    ScheduleBenchmarkSpec,
    parse_pool_sizes,
    run_schedule_benchmark,
)
from alignedserve.microbench.tables import print_records
from kvpool.policies.batch_former import BatchLimits


def bench_schedule(options: ScheduleOptions) -> int:
    """Run the command and return its exit code."""
    spec = ScheduleBenchmarkSpec(
        pool_sizes=parse_pool_sizes(options.pool_sizes),
        lengths=options.lengths,
        limits=BatchLimits(options.max_blocks, options.max_requests, options.min_requests),
        seed=options.seed,
    )
    with notes().status(f"{options.lengths}, {options.pool_sizes} pooled"):
        result = run_schedule_benchmark(spec)
    if options.json_output:
        write_json(to_json(result), "-")
        return 0
    print_records(results(), [asdict(row) for row in result.forming], title=f"batch formers, lengths {result.lengths}")
    print_records(results(), [asdict(row) for row in result.iterations], title="one decode iteration, lengths azure")
    return 0

"""`alignedserve bench kernels`: kernels alone, by every implementation.

Loads nothing that only a server needs (Ray, msgspec, an HTTP client): it runs on a bare machine with a GPU.
"""

from dataclasses import asdict

from alignedserve.cli.bench.options import KernelOptions
from alignedserve.cli.console import print_json, progress, results
from alignedserve.microbench.kernels.benchmark import KernelBenchmarkSpec, run_kernel_benchmark
from alignedserve.microbench.tables import print_kernels


def bench_kernels(options: KernelOptions) -> int:
    """Run the command and return its exit code."""
    spec = KernelBenchmarkSpec(options.device, options.shape, options.dtype, options.is_toy)
    with progress() as bar:
        task = bar.add_task("kernels", total=None, status="")
        report = run_kernel_benchmark(spec, lambda known: bar.update(task, completed=len(known.rows)))
    if options.json_output:
        print_json(asdict(report))
    else:
        print_kernels(results(), report)
    return 0

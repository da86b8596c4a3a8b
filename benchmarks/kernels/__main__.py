"""Attention and the other kernels of a pass alone, by every implementation that runs here, against the device's limits.

    python -m benchmarks.kernels [--shape llama-0.5b] [--dtype float32] [--name kernels/attention]

Loads nothing that only a server needs (Ray, msgspec, an HTTP client): it runs on a bare machine with a GPU.
"""

from dataclasses import asdict

from rich.console import Console

from benchmarks.kernels.benchmark import KernelBenchmarkSpec, run_kernel_benchmark
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import add_device
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.tables import print_kernels


def main() -> None:
    """Measure and print; record under a --name."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-3-8b", help="whose heads and widths are used")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--name", help="of the record, as kernels/attention; none is made without")
    add_device(parser)
    options = parser.parse_args()
    report = run_kernel_benchmark(KernelBenchmarkSpec(options.device, options.shape, options.dtype, options.toy))
    print_kernels(Console(), report)
    if options.name:
        print(write_result(options.name, asdict(report)))


if __name__ == "__main__":
    main()

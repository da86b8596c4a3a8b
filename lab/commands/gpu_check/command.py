"""`alignedserve gpu-check`: whether a GPU computes rightly, how fast, and one file to send back."""

from alignedserve.cli.console import require_writable, results
from lab.commands.gpu_check.options import GpuCheckOptions
from lab.gpu_check.check import CheckSpec, run_check


def gpu_check(options: GpuCheckOptions) -> int:
    require_writable(options.output)
    console = results()
    spec = CheckSpec(options.device, options.seconds, options.is_toy, options.output)
    return run_check(spec, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))

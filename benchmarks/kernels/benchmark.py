"""Every kernel of a pass alone, by every implementation that runs on the device, against what the device can do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.dtypes import torch_dtype
from benchmarks.kernels.attention import DECODE, attention_cases, batches, name_of
from benchmarks.kernels.blocks import block_cases
from benchmarks.kernels.cases import KernelCase, KernelSetup, rows_of
from benchmarks.kernels.rows import row_cases
from benchmarks.measuring.device_ceilings import TOY_SIZES, measure_device_ceilings
from benchmarks.measuring.device_choice import AUTO, chosen_device
from benchmarks.measuring.device_timing import DeviceTimer
from benchmarks.measuring.results import DeviceCeilings, KernelReport, KernelRow
from lab.profiling.shapes import SHAPES

_TOY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class KernelBenchmarkSpec:
    """Parameters of the benchmark. Raises ConfigError naming the field."""

    device: str = AUTO  # auto, cpu or cuda
    shape: str = "llama-3-8b"  # a name in SHAPES
    dtype: str = "bfloat16"
    is_toy: bool = False  # sizes of nothing but a trial
    num_rounds: int = 20

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"shape {self.shape!r} is none of {', '.join(SHAPES)}.")
        if self.num_rounds < 1:
            raise ConfigError("num_rounds must be at least 1.")


Groups = Callable[[KernelSetup], Iterable[list[KernelCase]]]


def all_groups(setup: KernelSetup) -> Iterable[list[KernelCase]]:
    """Return every kernel of a pass: groups to be measured by turns."""
    return chain(attention_cases(setup), block_cases(setup), row_cases(setup))


@torch.inference_mode()
def run_kernel_benchmark(
    spec: KernelBenchmarkSpec,
    on_measured: Callable[[KernelReport], None] = lambda _: None,
    groups: Groups = all_groups,
) -> KernelReport:
    """Measure one group after the other; `on_measured` sees the report after each. Raises ConfigError for a device that
    is not there."""
    torch.manual_seed(0)
    device, dtype = chosen_device(spec.device), torch_dtype(spec.dtype)
    setup = KernelSetup(device, dtype, SHAPES[spec.shape], spec.is_toy)
    if spec.is_toy:
        timer = DeviceTimer(device, num_rounds=1, budget_s=0.0, cold_bytes=_TOY_BYTES)
    else:
        timer = DeviceTimer(device, num_rounds=spec.num_rounds)
    ceilings = measure_device_ceilings(device, dtype, timer, TOY_SIZES if spec.is_toy else None)
    report = KernelReport(spec.shape, spec.dtype, ceilings, [], setup.left_out)
    for group in groups(setup):
        report.rows.extend(_measure(setup, group, timer, ceilings))
        on_measured(report)
    return report


def _measure(
    setup: KernelSetup, group: list[KernelCase], timer: DeviceTimer, ceilings: DeviceCeilings
) -> list[KernelRow]:
    runnable = setup.that_runs(group)
    if not runnable:
        return []

    def bound_of(kernel_case: KernelCase) -> tuple[str, float]:
        bound_s = ceilings.bound_s(kernel_case.num_bytes, kernel_case.num_operations, is_copy=kernel_case.is_copy)
        moves = ceilings.bound_s(kernel_case.num_bytes, 0, is_copy=kernel_case.is_copy) == bound_s
        return ("copy" if kernel_case.is_copy else "read") if moves else "matrix", bound_s

    rows = rows_of(runnable, timer.by_turns([kernel_case.run for kernel_case in runnable]), bound_of)
    return _compared(setup, rows) if runnable[0].kernel == DECODE else rows


def _compared(setup: KernelSetup, rows: list[KernelRow]) -> list[KernelRow]:
    mixed, even = (name_of(groups) for groups in batches(setup)[1:3])
    times = {(row.case, row.by): row.microseconds for row in rows}
    return [
        replace(row, against_aligned=row.microseconds / times[even, row.by])
        if row.case == mixed and (even, row.by) in times
        else row
        for row in rows
    ]

"""Cases of the kernel benchmark: one kernel over one batch, by every implementation that runs here."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.device.accelerator import synchronize
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.measuring.results import KernelRow
from kernels.gpu_dispatch import can_launch, gpu_kernels_available
from kernels.rotary import rotary_angles

TORCH, TRITON = "torch", "triton"


class KernelCase(NamedTuple):
    """One kernel over one batch, by one implementation."""

    kernel: str
    case: str
    by: str
    run: Callable[[], object]
    num_bytes: int  # that must be read, and written where `is_copy`
    num_operations: int = 0
    is_copy: bool = True


@dataclass(slots=True)
class KernelSetup:
    """Device and model of a run, and the cases that do not run there."""

    device: torch.device
    dtype: torch.dtype
    config: ModelConfig
    is_toy: bool
    left_out: list[str] = field(default_factory=list)

    @property
    def runs_triton(self) -> bool:
        """Return whether Triton's kernels are measured; its interpreter takes seconds for all but toys."""
        return gpu_kernels_available(self.device) and (self.device.type == "cuda" or self.is_toy)

    def that_runs(self, cases_of_group: list[KernelCase]) -> list[KernelCase]:
        """Return the cases whose first call, which also compiles and warms up, succeeds."""
        return [kernel_case for kernel_case in cases_of_group if self._runs(kernel_case)]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def kernels(self, name: str) -> Any | None:
        """Return a module of kernels.gpu where its kernels run."""
        return importlib.import_module(f"kernels.gpu.{name}") if self.runs_triton else None

    def angles(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=self.device) / half)
        return rotary_angles(torch.arange(num_tokens, device=self.device), frequencies, torch.float32)

    def _runs(self, kernel_case: KernelCase) -> bool:
        def trial() -> None:
            kernel_case.run()
            synchronize(self.device)

        if kernel_case.by == TORCH or self.device.type == "cpu":
            trial()
            return True
        runs = can_launch(
            f"{kernel_case.kernel}, {kernel_case.case}, {dtype_name(self.dtype)}, {kernel_case.by}", trial
        )
        if not runs:
            self.left_out.append(
                f"{kernel_case.kernel}, {kernel_case.case}, by {kernel_case.by}: its launch fails, the log says why"
            )
        return runs


def rows_of(
    cases_of_group: list[KernelCase], seconds: list[float], bound_of: Callable[[KernelCase], tuple[str, float]]
) -> list[KernelRow]:
    """Return the figures of cases and their times; `bound_of` gives the name and seconds of a case's lower bound."""
    rows = []
    for kernel_case, taken in zip(cases_of_group, seconds, strict=True):
        bound, bound_s = bound_of(kernel_case)
        rows.append(
            KernelRow(
                kernel=kernel_case.kernel,
                case=kernel_case.case,
                by=kernel_case.by,
                microseconds=taken * 1e6,
                gb_per_s=kernel_case.num_bytes / taken / 1e9,
                tflop_per_s=kernel_case.num_operations / taken / 1e12,
                bound=bound,
                share=bound_s / taken,
            )
        )
    return rows

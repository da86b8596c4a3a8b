"""What the benchmark of the kernels measures: pieces of work by whatever computes them here."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignedserve.microbench.results import KernelRow
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.device.timing import synchronize
from alignedserve.runtime.model.model_config import ModelConfig
from kernels.gpu_dispatch import can_launch, gpu_kernels_available
from kernels.rotary import rotary_angles

TORCH, TRITON = "torch", "triton"


class KernelWork(NamedTuple):
    """One kernel over one batch, by one implementation."""

    kernel: str
    case: str
    by: str
    run: Callable[[], object]
    num_bytes: int  # that must be read, and written where `is_copy`
    num_operations: int = 0
    is_copy: bool = True


@dataclass(slots=True)
class KernelBench:
    """Where and for which model; which work does not run."""

    device: torch.device
    dtype: torch.dtype
    config: ModelConfig
    is_toy: bool
    left_out: list[str] = field(default_factory=list)

    @property
    def runs_triton(self) -> bool:
        """Its interpreter takes seconds for what is not a toy."""
        return gpu_kernels_available(self.device) and (self.device.type == "cuda" or self.is_toy)

    def that_runs(self, works_of_group: list[KernelWork]) -> list[KernelWork]:
        """Those whose first call, which also compiles and warms up, goes through."""
        return [work for work in works_of_group if self._runs(work)]

    def randn(self, *shape: int) -> Tensor:
        """Normally distributed numbers in the dtype and on the device of the benchmark."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def kernels(self, name: str) -> Any | None:
        """A module of kernels.gpu where its kernels run."""
        return importlib.import_module(f"kernels.gpu.{name}") if self.runs_triton else None

    def angles(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos, sin [tokens, 1, head_dim / 2] float32."""
        half = self.config.head_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=self.device) / half)
        return rotary_angles(torch.arange(num_tokens, device=self.device), frequencies, torch.float32)

    def _runs(self, work: KernelWork) -> bool:
        def trial() -> None:
            work.run()
            synchronize(self.device)

        if work.by == TORCH or self.device.type == "cpu":
            trial()
            return True
        runs = can_launch(f"{work.kernel}, {work.case}, {dtype_name(self.dtype)}, {work.by}", trial)
        if not runs:
            self.left_out.append(f"{work.kernel}, {work.case}, by {work.by}: its launch fails, the log says why")
        return runs


def rows_of(
    works_of_group: list[KernelWork], seconds: list[float], bound_of: Callable[[KernelWork], tuple[str, float]]
) -> list[KernelRow]:
    """Figures of works and their times; `bound_of` gives the name and seconds of what a work cannot be faster than."""
    rows = []
    for work, taken in zip(works_of_group, seconds, strict=True):
        bound, bound_s = bound_of(work)
        rows.append(
            KernelRow(
                kernel=work.kernel,
                case=work.case,
                by=work.by,
                microseconds=taken * 1e6,
                gb_per_s=work.num_bytes / taken / 1e9,
                tflop_per_s=work.num_operations / taken / 1e12,
                bound=bound,
                share=bound_s / taken,
            )
        )
    return rows

"""Blocks of 80 KiB and of 2 MiB between a GPU and the host: the registered arena beside the page-locked ring."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.measuring.results import TransferReport
from benchmarks.transfer.device_transfers import pinned_rows, registered_rows
from benchmarks.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec

TARGET = 0.8  # of a plain page-locked copy
_TOY = TransferBenchmarkSpec(("toy",), (1,), num_rounds=1)


def compare_arena(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the rows of both ways; told after each."""
    spec, report, left_out = _TOY if is_toy else DEVICE_SPEC, TransferReport(), []
    for way in (registered_rows, pinned_rows):
        try:
            for row in way(spec, device):
                report.rows.append(row)
                on_measured({**asdict(report), "target": TARGET})
        except RuntimeError as error:
            left_out.append(f"{way.__name__}: {error}")
    return {**asdict(report), "target": TARGET, "left_out": left_out}

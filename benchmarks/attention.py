"""Decode attention of one layer: bytes read per second by every kernel that runs here, beside what reading alone takes.

    python -m benchmarks.attention [seconds]

Kernels take turns and the lower quartile of a kernel's times is kept, as other work disturbs many.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention import TORCH, AttentionPlanner
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.gathered_attention import GatheredPlanner
from alignedserve.runtime.paged_attention import PagedPlanner
from alignedserve.runtime.sequences import NewSequence, SequenceTable
from benchmarks.recording import write_result
from kernels.paged import PagedAttention, supported_levels

BLOCK_SIZE = 16
NUM_LAYERS = 2
HEADS = {"opt-125m (12 heads x 64)": (12, 1), "14 heads on 2 x 64": (2, 7)}
HEAD_DIM = 64
BATCHES = {
    "64 x 1024": [1024] * 64,
    "60 x 256 + 4 x 4096": [256] * 60 + [4096] * 4,
    "1 x 4096": [4096],
    "64 x 64": [64] * 64,
}
CEILING_BYTES = 256 << 20
WORDS = np.zeros(0, np.int64)


class Timed:
    """One kernel over one batch."""

    def __init__(self, planner: AttentionPlanner, rows: Any, queries: Tensor) -> None:
        self._step = planner.plan(rows, WORDS, WORDS)
        self._queries = queries
        self._out = torch.empty_like(queries)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """One turn: all layers once."""
        began = time.perf_counter()
        for layer in range(NUM_LAYERS):
            self._step.decode(self._queries, self._out, layer, False)
        self.seconds.append((time.perf_counter() - began) / NUM_LAYERS)


def lower_quartile(seconds: list[float]) -> float:
    """A time that other work has not disturbed much."""
    return statistics.quantiles(seconds, n=4)[0]


def take_turns(turns: list[Callable[[], None]], seconds: float) -> None:
    """Every one in turn, five times at least."""
    began = time.perf_counter()
    count = 0
    while count < 5 or time.perf_counter() - began < seconds:
        for turn in turns:
            turn()
        count += 1


def filled(lengths: list[int], heads: tuple[int, int], dtype: str) -> tuple[SequenceTable, BlockStorage]:
    """Sequences of these lengths, blocks in no order."""
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    storage = BlockStorage(BlockLayout(BLOCK_SIZE, NUM_LAYERS, heads[0], HEAD_DIM, dtype), sum(widths))
    storage.blocks.normal_()
    table = SequenceTable(max_sequences=len(lengths), max_context_len=max(lengths), block_size=BLOCK_SIZE)
    free = np.random.default_rng(0).permutation(sum(widths)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    for index, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        blocks = tuple(BlockId(free.pop()) for _ in range(width))
        table.add(NewSequence(RequestId(str(index)), (0,) * length, length, length - 1, blocks, sampling))
    return table, storage


def measure(name: str, heads: tuple[int, int], dtype: str, seconds: float) -> list[dict[str, Any]]:
    """One row of figures for each kernel."""
    lengths = BATCHES[name]
    table, storage = filled(lengths, heads, dtype)
    queries = torch.randn(len(lengths), *heads, HEAD_DIM).to(storage.blocks.dtype)
    rows = table.rows([RequestId(str(index)) for index in range(len(lengths))])
    planners: dict[str, AttentionPlanner] = {TORCH: GatheredPlanner(table, storage, None)}
    for level in supported_levels():
        paged = PagedAttention(storage.blocks, group=heads[1], level=level)
        planners[level] = PagedPlanner(table, None, paged)
    timed = {kernel: Timed(planner, rows, queries) for kernel, planner in planners.items()}
    reads: list[float] = []
    take_turns([*timed.values(), lambda: reads.append(read_once())], seconds)
    num_bytes = sum(lengths) * 2 * heads[0] * HEAD_DIM * storage.blocks.element_size()
    ceiling = CEILING_BYTES / lower_quartile(reads)
    return [
        {
            "batch": name,
            "dtype": dtype,
            "kernel": kernel,
            "ms": round(1e3 * (taken := lower_quartile(turn.seconds)), 3),
            "GB_per_s": round(num_bytes / taken / 1e9, 1),
            "of_ceiling": round(num_bytes / taken / ceiling, 2),
            "ceiling_GB_per_s": round(ceiling / 1e9, 1),
        }
        for kernel, turn in timed.items()
    ]


MEMORY = torch.ones(CEILING_BYTES // 4)


def read_once() -> float:
    """Seconds to read memory that no cache holds, with all threads."""
    began = time.perf_counter()
    MEMORY.sum()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    """Measure, print, record."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    figures = []
    for shape, heads in HEADS.items():
        for dtype in ("bfloat16", "float32"):
            for name in BATCHES:
                for row in measure(name, heads, dtype, seconds):
                    figures.append({"heads": shape, **row})
                    print(figures[-1], flush=True)
    write_result("attention", {"threads": torch.get_num_threads(), "decode": figures})


if __name__ == "__main__":
    main()

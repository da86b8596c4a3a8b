"""Attention of one layer by every kernel that runs here. Decode: bytes read per second, beside reading alone.
Prefill in chunks: arithmetic per second, beside that of a packed matrix product.

    python -m benchmarks.kernels.attention [seconds]

Kernels take turns and the lower quartile of a kernel's times is kept, as other work disturbs many.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.microbench.kernels.attention_batches import AttentionBatch, attention_batch, num_blocks_of
from alignedserve.microbench.shapes import LLAMA_0_5B
from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import ModelConfig
from benchmarks.support.recording import write_result
from kernels.linear import Linear

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
# (sequences, new tokens of each, context that the new tokens end)
CHUNKS = {
    "64 x 32": (64, 32, 32),
    "2 x 1024": (2, 1024, 1024),
    "1 x 512 after 1536": (1, 512, 2048),
    "32 x 16 after 1008": (32, 16, 1024),
}
CEILING_BYTES = 256 << 20
PRODUCT_WIDTH, PRODUCT_ROWS = 2048, 512


class Timed:
    """One kernel over one batch."""

    def __init__(self, turn: Callable[[int], None]) -> None:
        """`turn` computes one layer."""
        self._turn = turn
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Run one turn: all layers once."""
        began = time.perf_counter()
        for layer in range(NUM_LAYERS):
            self._turn(layer)
        self.seconds.append((time.perf_counter() - began) / NUM_LAYERS)


def lower_quartile(seconds: list[float]) -> float:
    """Return a time that other work has not disturbed much."""
    return statistics.quantiles(seconds, n=4)[0]


def take_turns(turns: list[Callable[[], None]], seconds: float) -> None:
    """Call every one in turn, five times at least."""
    began = time.perf_counter()
    count = 0
    while count < 5 or time.perf_counter() - began < seconds:
        for turn in turns:
            turn()
        count += 1


def filled(lengths: list[int], num_new: int, heads: tuple[int, int], dtype: str) -> AttentionBatch:
    """Make sequences of these lengths, of which the last `num_new` tokens are to be computed."""
    layout = BlockLayout(BLOCK_SIZE, NUM_LAYERS, heads[0], HEAD_DIM, dtype)
    storage = BlockStorage(layout, num_blocks_of(lengths, BLOCK_SIZE))
    storage.blocks.normal_()
    return attention_batch(storage, lengths, num_new)


def shape_of(heads: tuple[int, int]) -> ModelConfig:
    """Return a model with these key heads and query heads per key head."""
    return replace(LLAMA_0_5B, num_kv_heads=heads[0], num_heads=heads[0] * heads[1], head_dim=HEAD_DIM)


def measure_decode(name: str, heads: tuple[int, int], dtype: str, seconds: float) -> list[dict[str, Any]]:
    """Measure one row of figures for each kernel."""
    lengths = BATCHES[name]
    batch = filled(lengths, 1, heads, dtype)
    queries = torch.randn(len(lengths), *heads, HEAD_DIM).to(batch.storage.blocks.dtype)

    def turn_of(step: StepAttention) -> Callable[[int], None]:
        out = torch.empty_like(queries)
        return lambda layer: step.decode(queries, out, layer, False)

    planners = batch.planners(shape_of(heads))
    timed = {kernel: Timed(turn_of(batch.decodes(planner))) for kernel, planner in planners.items()}
    reads: list[float] = []
    take_turns([*timed.values(), lambda: reads.append(read_once())], seconds)
    num_bytes = sum(lengths) * 2 * heads[0] * HEAD_DIM * batch.storage.blocks.element_size()
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


def measure_prefill(name: str, heads: tuple[int, int], dtype: str, seconds: float) -> list[dict[str, Any]]:
    """Measure one row of figures for each kernel."""
    count, num_new, context_len = CHUNKS[name]
    batch = filled([context_len] * count, num_new, heads, dtype)
    kind = batch.storage.blocks.dtype
    queries = torch.randn(count * num_new, *heads, HEAD_DIM).to(kind)
    # Where nothing was computed before, the gathering kernel takes them from here instead of from blocks.
    new = (torch.randn(count * num_new, heads[0] * HEAD_DIM).to(kind),) * 2

    def turn_of(step: StepAttention) -> Callable[[int], None]:
        out = torch.empty_like(queries)
        return lambda layer: step.chunks(queries, new, out, layer, False)

    planners = batch.planners(shape_of(heads))
    timed = {kernel: Timed(turn_of(batch.chunks(planner, num_new))) for kernel, planner in planners.items()}
    product = PackedProduct(kind)
    take_turns([*timed.values(), product], seconds)
    # Both products of a query with the keys up to its own: two operations each per element.
    num_pairs = count * sum(range(context_len - num_new + 1, context_len + 1))
    num_operations = 4 * num_pairs * heads[0] * heads[1] * HEAD_DIM
    ceiling = product.operations_per_s()
    return [
        {
            "batch": name,
            "dtype": dtype,
            "kernel": kernel,
            "ms": round(1e3 * (taken := lower_quartile(turn.seconds)), 3),
            "GFLOP_per_s": round(num_operations / taken / 1e9, 1),
            "of_ceiling": round(num_operations / taken / ceiling, 2),
            "ceiling_GFLOP_per_s": round(ceiling / 1e9, 1),
        }
        for kernel, turn in timed.items()
    ]


class PackedProduct:
    """A linear layer over many rows: the arithmetic that this processor does at its best."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._product = Linear(torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH).to(dtype))
        self._rows = torch.randn(PRODUCT_ROWS, PRODUCT_WIDTH).to(dtype)
        self._seconds: list[float] = []

    def __call__(self) -> None:
        """Run one turn."""
        began = time.perf_counter()
        self._product(self._rows)
        self._seconds.append(time.perf_counter() - began)

    def operations_per_s(self) -> float:
        """Return the operations per second of the turns so far."""
        return 2 * PRODUCT_ROWS * PRODUCT_WIDTH**2 / lower_quartile(self._seconds)


MEMORY = torch.ones(CEILING_BYTES // 4)


def read_once() -> float:
    """Return the seconds to read memory that no cache holds, with all threads."""
    began = time.perf_counter()
    MEMORY.sum()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    """Measure, print, record."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    decode, prefill = [], []
    for shape, heads in HEADS.items():
        for dtype in ("bfloat16", "float32"):
            for name in BATCHES:
                for row in measure_decode(name, heads, dtype, seconds):
                    decode.append({"heads": shape, **row})
                    print(decode[-1], flush=True)
            for name in CHUNKS:
                for row in measure_prefill(name, heads, dtype, seconds):
                    prefill.append({"heads": shape, **row})
                    print(prefill[-1], flush=True)
    write_result("attention", {"threads": torch.get_num_threads(), "decode": decode, "prefill": prefill})


if __name__ == "__main__":
    main()

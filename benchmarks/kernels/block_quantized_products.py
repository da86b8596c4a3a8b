"""Products with weights in the blocks of GGUF files: beside a plain read of as many bytes, and 8-bit products.

    python -m benchmarks.kernels.block_quantized_products [seconds] [types, such as Q4_1,Q6_K]

Weights come from memory, as in a pass over many layers: there are more of them than the caches hold. All take turns.
The tenth percentile counts: other work on the machine delays some rounds, and a median says more about that work. A
plain read is PyTorch's sum over float32 numbers.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.support.recording import write_result
from kernels.block_formats import BLOCK_FORMATS, format_named
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, block_levels
from kernels.cpu.packed_linear import INT8, PackedLinear, packed_levels

# (inputs, columns): a layer of SmolLM2-135M, then layers of 0.5B and 1.7B Llama shapes.
WIDTHS = ((576, 3072), (1024, 9728), (4864, 896), (2048, 8192))
ROWS = (1, 4, 16, 64, 512)
CACHE_BYTES = 64 << 20

Product = Callable[[Tensor], object]


class Sides(NamedTuple):
    """One weight's products, and the read beside them."""

    blocks: BlockQuantizedLinear
    int8: Product | None
    read: Product


def sides(type_name: str, in_width: int, columns: int) -> Sides:
    """Make a random weight and its products. Its bits do not matter to the time, as long as no number is NaN."""
    row_bytes = BLOCK_FORMATS[type_name].row_bytes(in_width)
    raw = torch.randint(0, 64, (columns, row_bytes), dtype=torch.uint8)
    blocks = BlockQuantizedLinear(raw, type_name, in_width)
    levels = packed_levels(INT8, torch.device("cpu"))
    as_many = torch.ones(blocks.num_bytes // 4)
    int8 = PackedLinear(torch.randn(columns, in_width), None, level=levels[0], element=INT8) if levels else None
    return Sides(blocks, int8, lambda _: as_many.sum())


def measure(type_name: str, in_width: int, columns: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row of figures per number of rows."""
    weight_bytes = columns * BLOCK_FORMATS[type_name].row_bytes(in_width)
    weights = [sides(type_name, in_width, columns) for _ in range(max(1, CACHE_BYTES // weight_bytes))]
    return [_measure_rows(weights, rows, type_name, seconds) for rows in ROWS]


def _measure_rows(weights: Sequence[Sides], rows: int, type_name: str, seconds: float) -> dict[str, Any]:
    blocks = weights[0].blocks
    x = torch.randn(rows, blocks.in_width)
    times: dict[str, list[float]] = {name: [] for name in Sides._fields if getattr(weights[0], name)}
    began = time.perf_counter()
    turn = 0
    while turn < 5 or time.perf_counter() - began < seconds:
        for name, taken in times.items():
            product = getattr(weights[turn % len(weights)], name)
            started = time.perf_counter()
            product(x)
            taken.append(time.perf_counter() - started)
        turn += 1
    best = {name: sorted(taken[1:])[len(taken) // 10] for name, taken in times.items()}
    return {
        "type": type_name,
        "inputs": blocks.in_width,
        "columns": blocks.out_width,
        "rows": rows,
        "us": {name: round(1e6 * taken, 1) for name, taken in best.items()},
        "weight_GB_per_s": round(blocks.num_bytes / best["blocks"] / 1e9, 1),
        "share_of_plain_read": round(best["read"] / best["blocks"], 2),
        "GMAC_per_s": round(rows * blocks.in_width * blocks.out_width / best["blocks"] / 1e9, 1),
        "times_int8": round(best["int8"] / best["blocks"], 2) if "int8" in best else None,
    }


def main() -> None:
    """Print a line per case and write the result."""
    assert block_levels(), "the native kernels are not built"
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    figures: list[dict[str, Any]] = []
    for type_name in sys.argv[2].split(",") if len(sys.argv) > 2 else BLOCK_FORMATS:
        layout = format_named(type_name)
        for in_width, columns in WIDTHS:
            if in_width % layout.num_values:
                continue
            for row in measure(type_name, in_width, columns, seconds):
                print(row, flush=True)
                figures.append(row)
    threads = torch.get_num_threads()
    write_result("block_quantized_products", {"threads": threads, "level": block_levels()[0], "products": figures})


if __name__ == "__main__":
    main()

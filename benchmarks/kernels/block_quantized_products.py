"""Products with weights in the blocks of GGUF files, beside products of 8 bits and of bfloat16 and a plain read.

    python -m benchmarks.kernels.block_quantized_products [seconds] [types, such as Q4_1,Q6_K]

Weights come from memory, as in a pass over many layers: there are more of them than the caches hold. All sides take
turns, with inputs and results in bfloat16. The tenth percentile counts: other work on the machine delays some rounds,
and a median says more about that work. A plain read is PyTorch's sum over as many bytes as the blocks have.
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

# (inputs, columns): layers of SmolLM2-135M, then of 0.5B and 8B Llama shapes.
WIDTHS = ((576, 960), (576, 3072), (1536, 576), (1024, 9728), (4096, 6144))
ROWS = (1, 4, 16, 64, 256, 512)
CACHE_BYTES = 48 << 20

Product = Callable[[Tensor], object]


class Packed(NamedTuple):
    """One weight's products without blocks; None where the processor has no such kernel."""

    int8: Product | None
    bfloat16: Product | None


def packed_weights(in_width: int, columns: int, count: int) -> list[Packed]:
    """Make random weights."""
    elements: tuple[torch.dtype | str, ...] = (INT8, torch.bfloat16)
    levels = [packed_levels(element, torch.device("cpu")) for element in elements]
    made = []
    for _ in range(count):
        weight = torch.randn(columns, in_width, dtype=torch.bfloat16)
        products = [
            PackedLinear(weight, None, level=names[0], element=element) if names else None
            for element, names in zip(elements, levels, strict=True)
        ]
        made.append(Packed(*products))
    return made


def block_weight(type_name: str, in_width: int, columns: int) -> BlockQuantizedLinear:
    """Make a random weight. Its bits do not matter to the time, as long as no number is NaN."""
    raw = torch.randint(0, 64, (columns, BLOCK_FORMATS[type_name].row_bytes(in_width)), dtype=torch.uint8)
    return BlockQuantizedLinear(raw, type_name, in_width, dtype=torch.bfloat16)


def measure(type_names: Sequence[str], in_width: int, columns: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row of figures per type and number of rows."""
    packed = packed_weights(in_width, columns, max(2, CACHE_BYTES // (in_width * columns)))
    figures = []
    for type_name in type_names:
        blocks = [block_weight(type_name, in_width, columns) for _ in packed]
        for rows in ROWS:
            figures.append({"type": type_name, **_measure_rows(blocks, packed, rows, seconds)})
            print(figures[-1], flush=True)
    return figures


def _measure_rows(
    blocks: Sequence[BlockQuantizedLinear], packed: Sequence[Packed], rows: int, seconds: float
) -> dict[str, Any]:
    first = blocks[0]
    reads = [_read_of(torch.ones(first.num_bytes // 4)) for _ in blocks]
    sides: dict[str, Sequence[Product]] = {"blocks": blocks, "read": reads}
    for name in Packed._fields:
        products = [product for weights in packed if (product := getattr(weights, name))]
        sides |= {name: products} if products else {}
    best = _best_times(sides, torch.randn(rows, first.in_width).bfloat16(), seconds)
    return {
        "inputs": first.in_width,
        "columns": first.out_width,
        "rows": rows,
        "us": {name: round(1e6 * taken, 1) for name, taken in best.items()},
        "weight_GB_per_s": round(first.num_bytes / best["blocks"] / 1e9, 1),
        "share_of_plain_read": round(best["read"] / best["blocks"], 2),
        "GMAC_per_s": round(rows * first.in_width * first.out_width / best["blocks"] / 1e9, 1),
        **{f"times_{name}": round(best[name] / best["blocks"], 2) for name in Packed._fields if name in best},
    }


def _read_of(numbers: Tensor) -> Product:
    return lambda _: numbers.sum()


def _best_times(sides: dict[str, Sequence[Product]], x: Tensor, seconds: float) -> dict[str, float]:
    """Return the tenth percentile of each side's times, of the weights in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    turn = 0
    while turn < 5 or time.perf_counter() - began < seconds:
        for name, products in sides.items():
            product = products[turn % len(products)]
            started = time.perf_counter()
            product(x)
            times[name].append(time.perf_counter() - started)
        turn += 1
    return {name: sorted(taken[1:])[len(taken) // 10] for name, taken in times.items()}


def main() -> None:
    """Print a line per case and write the result."""
    assert block_levels(), "the native kernels are not built"
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.4
    type_names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(BLOCK_FORMATS)
    figures: list[dict[str, Any]] = []
    for in_width, columns in WIDTHS:
        fitting = [name for name in type_names if not in_width % format_named(name).num_values]
        figures += measure(fitting, in_width, columns, seconds)
    threads = torch.get_num_threads()
    write_result("block_quantized_products", {"threads": threads, "level": block_levels()[0], "products": figures})


if __name__ == "__main__":
    main()

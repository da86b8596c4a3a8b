"""Products of packed weights: the native kernels beside oneDNN's packed layout and plain PyTorch.

    python -m benchmarks.kernels.products [--seconds 0.4]
    python -m benchmarks.kernels.products --widths 4096x4096 4128x4096 --name kernels/products_of_pages

Weights come from memory, as in a pass over many layers: there are more of them than the caches hold. All take turns;
medians count.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from kernels.cpu.packed_linear import INT8, PackedLinear, packed_levels
from kernels.linear import Linear, OneDnnLinear

# (inputs, columns): the layers of the 125M OPT and the 0.5B Llama shapes, and a language-model head.
WIDTHS = ((768, 2304), (768, 768), (3072, 768), (896, 9728), (4864, 896), (768, 50272))
ROWS = (1, 4, 16, 32, 64, 512)
CACHE_BYTES = 128 << 20
DTYPES = (torch.float32, torch.bfloat16)

Product = Callable[[Tensor], Tensor]


def products(weight: Tensor) -> dict[str, Product]:
    """Return every way to multiply by this weight that is here."""
    levels, int8 = packed_levels(weight.dtype, weight.device), packed_levels(INT8, weight.device)
    made: dict[str, Product] = {"onednn": OneDnnLinear(weight), "torch": Linear(weight, allow_packing=False)}
    for level in levels:
        made[level] = PackedLinear(weight, None, level=level, element=weight.dtype)
    if int8:
        made[f"int8 {int8[0]}"] = PackedLinear(weight, None, level=int8[0], element=INT8)
    return made


def measure(in_width: int, columns: int, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Measure one row of figures per number of rows."""
    count = max(1, CACHE_BYTES // (in_width * columns * dtype.itemsize))
    weights = [products(torch.randn(columns, in_width).mul_(in_width**-0.5).to(dtype)) for _ in range(count)]
    return [_measure_rows(weights, rows, in_width, columns, dtype, seconds) for rows in ROWS]


def _measure_rows(
    weights: list[dict[str, Product]], rows: int, in_width: int, columns: int, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    x = torch.randn(rows, in_width).to(dtype)
    times: dict[str, list[float]] = {name: [] for name in weights[0]}
    began = time.perf_counter()
    turn = 0
    while turn < 5 or time.perf_counter() - began < seconds:
        for name, taken in times.items():
            started = time.perf_counter()
            weights[turn % len(weights)][name](x)
            taken.append(time.perf_counter() - started)
        turn += 1
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    operations = 2.0 * rows * in_width * columns
    native = [name for name in medians if name not in ("onednn", "torch") and not name.startswith("int8")]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "inputs": in_width,
        "columns": columns,
        "rows": rows,
        "us": {name: round(1e6 * median, 1) for name, median in medians.items()},
        "GFLOP_per_s": {name: round(operations / median / 1e9, 1) for name, median in medians.items()},
        "weight_GB_per_s": {
            name: round(in_width * columns * dtype.itemsize / medians[name] / 1e9, 1) for name in native
        },
        "times_onednn": {name: round(medians["onednn"] / medians[name], 2) for name in native},
    }


def main() -> None:
    """Print a line per case and write the result."""
    parser = parser_of(__doc__, name="kernels/products")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a case")
    parser.add_argument("--widths", nargs="+", default=[f"{rows}x{columns}" for rows, columns in WIDTHS])
    arguments = parser.parse_args()
    widths = [tuple(map(int, one.split("x"))) for one in arguments.widths]
    figures: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for in_width, columns in widths:
            for row in measure(in_width, columns, dtype, arguments.seconds):
                print(row, flush=True)
                figures.append(row)
    write_result(arguments.name, {"threads": torch.get_num_threads(), "products": figures})


if __name__ == "__main__":
    main()

"""Iterations of a model whose weights are narrow, against the same in its own dtype: random weights, made there."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from alignedserve.core.block_layout import FP8
from alignedserve.core.errors import AlignedServeError
from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.weights.packed_products import Float8Rows, GroupedRows, Rows
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from alignedserve.runtime.model.weights.weight_source import RandomSource
from benchmarks.measuring.timed_engine import TimedEngine
from kernels.grouped_linear import Numbers, random_weight
from lab.profiling.shapes import SHAPES

TARGET = 0.65  # of the iteration in the model's dtype
FLOAT8, BLOCKS, INT4 = "FP8 by row", "FP8 in blocks", "4 bits in groups"
BOTH = "FP8 by row, and an FP8 cache"  # with 64 x 2048 tokens the cache is half of what a step reads
_PLAIN = "model's dtype"
_HEAD = "lm_head"


class Sizes(NamedTuple):
    """Model and iterations."""

    shape: str
    dtype: str
    decodes: tuple[tuple[int, int], ...]  # sequences, tokens of each
    prompt_len: int
    num_rounds: int


REAL = Sizes("llama-3-8b", "bfloat16", ((64, 2048), (1, 2048)), 4096, 5)
TOY = Sizes("toy", "float32", ((3, 24),), 32, 1)


def compare_iterations(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return milliseconds by form and iteration, and ratios to those of the model's dtype; told after each form."""
    sizes = TOY if is_toy else REAL
    figures: dict[str, Any] = {"shape": sizes.shape, "dtype": sizes.dtype, "target": TARGET, "rows": [], "left_out": []}
    for form in (_PLAIN, FLOAT8, BOTH, BLOCKS, INT4):
        try:
            figures["rows"] += _measure(form, sizes, device)
        except (RuntimeError, AlignedServeError) as error:  # no FP8 on this GPU, say
            figures["left_out"].append(f"{form}: {str(error)[:200]}")
        on_measured(_compared(figures))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _compared(figures)


def _compared(figures: dict[str, Any]) -> dict[str, Any]:
    plain = {row["what"]: row["milliseconds"] for row in figures["rows"] if row["form"] == _PLAIN}
    for row in figures["rows"]:
        row["ratio"] = row["milliseconds"] / plain[row["what"]] if row["what"] in plain else None
    return figures


def _measure(form: str, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    config = SHAPES[sizes.shape]
    source = _NarrowSource(torch_dtype(sizes.dtype), device, form)
    points = {f"decode, {count} x {length}": Point("d", contexts=(length,) * count) for count, length in sizes.decodes}
    points[f"prefill, {sizes.prompt_len} tokens"] = Point("p", chunks=(Chunk(sizes.prompt_len, 0, True),))
    decoder = Decoder(config, assemble_weights(config, source))
    engine = TimedEngine(decoder, list(points.values()), cache=FP8 if form == BOTH else sizes.dtype)
    rows = []
    for what, point in points.items():
        rows.append({"form": form, "what": what, "milliseconds": engine.seconds(point, sizes.num_rounds) * 1e3})
        print(rows[-1], flush=True)
    return rows


class _NarrowSource(RandomSource):
    """A source of any name and shape; the head stays in the model's dtype, as checkpoints leave it."""

    def __init__(self, dtype: torch.dtype, device: torch.device, form: str) -> None:
        super().__init__(0, dtype, device)
        self._form = form

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        if self._form == _PLAIN or _HEAD in name or "embed" in name:
            return None
        numbers = Numbers.INT4 if self._form == INT4 else Numbers.FLOAT8
        weight = random_weight(numbers, self.device, *shape)
        if self._form not in (FLOAT8, BOTH):
            return GroupedRows(weight)
        return Float8Rows(weight.words.view(torch.float8_e4m3fn), weight.scales[:, 0].contiguous())

"""Lower bounds of a run of the engine: its own products alone, and reading the weights once per step."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.model.weights.weight_loader import DecoderWeights, LayerWeights
from kernels.addends import Addends
from kernels.cpu.decode_pass import NativeParts, NativeProduct
from kernels.feed_forward import FeedForwardPart
from kernels.linear import Projection

# Numbers of rows that are timed; the others are interpolated.
_MAX_POINTS = 10
_ROUNDS = 3
_READ_BYTES = 512 << 20


class ProductClock:
    """Notes how long the products of a run take and of how many rows they are."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.layer_rows: Counter[int] = Counter()  # passes by the number of their tokens
        self.head_rows: Counter[int] = Counter()  # language-model heads by the number of sampled rows

    def reset(self) -> None:
        self.seconds = 0.0
        self.layer_rows.clear()
        self.head_rows.clear()

    def note_pass(self, rows: int, seconds: float, *, has_head: bool) -> None:
        self.seconds += seconds
        self.layer_rows[rows] += 1
        self.head_rows[rows] += has_head

    def watch(self, weights: DecoderWeights) -> DecoderWeights:
        layers = [self._watch_layer(layer) for layer in weights.layers]
        layers[0] = replace(layers[0], qkv=_TimedProjection(weights.layers[0].qkv, self, self.layer_rows))
        return replace(weights, layers=tuple(layers), lm_head=_TimedProjection(weights.lm_head, self, self.head_rows))

    def _watch_layer(self, layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            qkv=_TimedProjection(layer.qkv, self),
            output=_TimedProjection(layer.output, self),
            mlp=None if layer.mlp is None else self._watch_mlp(layer.mlp),
        )

    def _watch_mlp(self, mlp: FeedForwardPart | Projection) -> FeedForwardPart | Projection:
        if not isinstance(mlp, FeedForwardPart):
            return _TimedProjection(mlp, self)
        return FeedForwardPart(_TimedProjection(mlp.gate_up, self), _TimedProjection(mlp.down, self))


class _TimedProjection:
    __slots__ = ("_clock", "_counter", "_product", "in_width", "out_width")

    def __init__(self, product: Projection, clock: ProductClock, counter: Counter[int] | None = None) -> None:
        self._product = product
        self._clock = clock
        self._counter = counter
        self.in_width, self.out_width = product.in_width, product.out_width

    @property
    def native_parts(self) -> NativeParts:
        """Return the product's, which is not timed where these run; see `ProductClock.note_pass`."""
        return self._product.native_parts if isinstance(self._product, NativeProduct) else ()

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        assert addends is None, "what adapters add is not timed"
        started = time.perf_counter()
        result = self._product(x)
        self._clock.seconds += time.perf_counter() - started
        if self._counter is not None:
            self._counter[x.shape[0]] += 1
        return result


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Seconds that the run could not have saved, and what they were measured with."""

    gemm_floor_s: float  # all products of the run, nothing else
    weight_reading_s: float  # reading every weight of them once per step
    read_bytes_per_s: float  # from memory, all threads


@torch.inference_mode()
def measure_ceilings(weights: DecoderWeights, clock: ProductClock, bytes_per_step: int, num_steps: int) -> Ceilings:
    dtype = weights.embedding.dtype
    floor_s = _floor(weights.layer_projections, clock.layer_rows, dtype)
    floor_s += _floor((weights.lm_head,), clock.head_rows, dtype)
    read_bytes_per_s = measure_read_bandwidth()
    return Ceilings(floor_s, num_steps * bytes_per_step / read_bytes_per_s, read_bytes_per_s)


def measure_read_bandwidth(size: int = _READ_BYTES) -> float:
    """Return the bytes per second that all threads read from memory."""
    values = torch.zeros(size // 8, dtype=torch.int64)
    return size / best_of(_ROUNDS, lambda: values.sum())


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """Return the shortest of a few repetitions, in seconds, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _floor(products: Sequence[Projection], rows: Counter[int], dtype: torch.dtype) -> float:
    if not rows:
        return 0.0
    points = chosen_points(sorted(rows))
    seconds = [_time_products(products, point, dtype) for point in points]
    return sum(count * float(np.interp(number, points, seconds)) for number, count in rows.items())


def chosen_points(rows: Sequence[int]) -> list[int]:
    """Choose at most _MAX_POINTS of these ascending numbers, the first and the last among them."""
    if len(rows) <= _MAX_POINTS:
        return list(rows)
    places = np.geomspace(rows[0], rows[-1], _MAX_POINTS)
    return sorted({rows[int(np.abs(np.array(rows) - place).argmin())] for place in places})


def _time_products(products: Sequence[Projection], rows: int, dtype: torch.dtype) -> float:
    inputs = {width: torch.randn(rows, width).to(dtype) for width in {product.in_width for product in products}}

    def run() -> None:
        for product in products:
            product(inputs[product.in_width])

    return best_of(_ROUNDS, run)

"""Llama-2-7B on A100-80GB and H100: the measured time of a layer against its tokens (Vidur, MLSys 2024).

Its tables hold all of a layer but attention, which is the roofline's, as are logits and the launching of kernels.
"""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from itertools import accumulate, pairwise

from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import RooflineModel
from lab.costmodel.published.files import rows_of


class Curve:
    """Piecewise linear through (x, y) points; a dip counts as what came before it.

    Below the first point it is flat, beyond the last it goes on as between the last two. At least two points, x rising.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = list(points)
        assert len(ordered) >= 2, "one point is no curve"
        assert all(left[0] < right[0] for left, right in pairwise(ordered)), "x must rise"
        self._xs = [x for x, _ in ordered]
        self._ys = list(accumulate((y for _, y in ordered), max))

    def at(self, x: float) -> float:
        if x <= self._xs[0]:
            return self._ys[0]
        last = min(bisect_right(self._xs, x), len(self._xs) - 1)
        left, right = self._xs[last - 1], self._xs[last]
        low, high = self._ys[last - 1], self._ys[last]
        return low + (high - low) * (x - left) / (right - left)


MODEL_NAME = "llama-2-7b"
_MS = 1e-3


class MeasuredLayersModel(RooflineModel):
    """A roofline whose layers and all-reduces are looked up. Raises ConfigError listing what was measured."""

    def __init__(self, machine: str, tensor_parallel: int, kernel: AttentionKernel) -> None:
        shape = model_shape(MODEL_NAME)
        self._layer = layer_curve(machine, tensor_parallel)
        self._all_reduce = collective_curve(machine, "all_reduce", tensor_parallel) if tensor_parallel > 1 else None
        self._token_bytes = shape.hidden_size * shape.dtype_bytes
        super().__init__(shape, hardware(machine), tensor_parallel=tensor_parallel, kernel=kernel)

    @override
    def layers_s(self, num_tokens: int) -> float:
        return self.shape.num_layers * self._layer.at(num_tokens)

    @override
    def collectives_s(self, num_tokens: int) -> float:
        if self._all_reduce is None:
            return 0.0
        return 2 * self.shape.num_layers * self._all_reduce.at(num_tokens * self._token_bytes)


def layer_curve(machine: str, tensor_parallel: int) -> Curve:
    """Return the seconds of one layer without attention, by tokens. Raises ConfigError listing what was measured."""
    curves = _curves()
    if (machine, tensor_parallel) not in curves:
        known = ", ".join(f"{name} x {degree}" for name, degree in curves)
        raise ConfigError(f"published vidur has no {MODEL_NAME} on {machine} x {tensor_parallel}; it has {known}.")
    return curves[machine, tensor_parallel]


@cache
def _curves() -> dict[tuple[str, int], Curve]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows_of("llama_2_7b_layer.csv"):
        key = (row["hardware"], int(row["tensor_parallel"]))
        points.setdefault(key, []).append((float(row["num_tokens"]), float(row["layer_ms"]) * _MS))
    return {key: Curve(found) for key, found in points.items()}


def collective_curve(machine: str, operation: str, num_workers: int) -> Curve:
    """Return the seconds by bytes, for all_reduce among 2, 4 or 8 or send_recv between 2.

    Raises ConfigError listing what is.
    """
    curves = _collective_curves()
    if (machine, operation, num_workers) not in curves:
        known = ", ".join(f"{name} {what} x {degree}" for name, what, degree in curves)
        raise ConfigError(f"there is no published {operation} among {num_workers} of {machine!r}; there is {known}.")
    return curves[machine, operation, num_workers]


@cache
def _collective_curves() -> dict[tuple[str, str, int], Curve]:
    points: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in rows_of("dgx_collectives.csv"):
        key = (row["hardware"], row["operation"], int(row["num_workers"]))
        points.setdefault(key, []).append((float(row["size_bytes"]), float(row["ms"]) * _MS))
    return {key: Curve(found) for key, found in points.items()}

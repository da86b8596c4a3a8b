"""Calibration of a simulated worker: the iterations that a live one measures before it serves, at their true cost."""

from collections.abc import Sequence

from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.iteration_points import Point, calibrate, calibration_points, feasible_points
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.scheduling.policy import IterationLimits

_NUM_ROUNDS = 2  # nothing scatters here, and a thousand nodes have two thousand workers
_SPARE = 4  # tokens by which a live worker lets every request grow


def points_of(layout: BlockLayout, limits: IterationLimits, *, num_blocks: int, has_hidden_cache: bool) -> list[Point]:
    points = calibration_points(
        max_requests=limits.max_running_requests, max_tokens=limits.max_tokens, has_hidden_cache=has_hidden_cache
    )
    return feasible_points(
        points,
        max_context_len=num_blocks * layout.block_size,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        spare=_SPARE,
    )


def calibrated(costs: CostModel, points: Sequence[Point], duration_s: float) -> tuple[Sample, ...]:
    elapsed_s = 0.0

    def measure(point: Point) -> float:
        nonlocal elapsed_s
        seconds = costs.swap_s(2 * point.num_swapped) if point.num_swapped else costs.iteration_s(point.work)
        elapsed_s += seconds
        return seconds

    max_samples = _NUM_ROUNDS * len(points)
    return calibrate(points, measure, clock=lambda: elapsed_s, duration_s=duration_s, max_samples=max_samples)

"""Calibration of a simulated worker: the iterations that a live one measures before it serves, at their true cost."""

from itertools import cycle

from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.iteration_points import Point, calibration_points, feasible_points
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel

_MAX_SAMPLES = 256  # of costs that are next to nothing
_SPARE = 4  # tokens by which a live worker lets every request grow


def points_of(
    layout: BlockLayout, *, num_blocks: int, max_running_requests: int, has_hidden_cache: bool
) -> list[Point]:
    """Return the points that a worker of this memory has room for."""
    points = feasible_points(
        calibration_points(has_hidden_cache=has_hidden_cache),
        max_context_len=num_blocks * layout.block_size,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        spare=_SPARE,
    )
    return [point for point in points if point.num_requests <= max_running_requests]


def calibrated(costs: CostModel, points: list[Point], duration_s: float) -> tuple[Sample, ...]:
    """Return what a worker measures in this time, point after point and round after round; 0: nothing."""
    samples: list[Sample] = []
    elapsed_s = 0.0
    for point in cycle(points if duration_s > 0.0 else ()):
        sample = Sample(point.work, costs.iteration_s(point.work))
        samples.append(sample)
        elapsed_s += sample.seconds
        if elapsed_s > duration_s or len(samples) == _MAX_SAMPLES:
            break
    return tuple(samples)

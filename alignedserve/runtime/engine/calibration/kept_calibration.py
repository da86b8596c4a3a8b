"""What a calibration measured, kept on disk for the next start of the same model on the same machine.

It is believed where two iterations, measured again, take about as long; else all is measured anew.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignedserve.costmodel.iteration_points import Point
from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.device.cores import processor_name
from alignedserve.runtime.device.verdicts import keep, read_kept, verdict_path
from kernels.cpu.native import built_at

_KIND = "calibration"
_TRIED_AGAIN = 2  # points, which are short
_MOST_TRIES = 10  # of each: whatever else this machine does, as it starts, only makes an iteration longer
_MAX_RATIO = 1.4  # between what is kept and what is measured again


@dataclass(frozen=True, slots=True)
class KeptCalibration:
    """The place of one model's measurements."""

    folder: Path
    described: tuple[str, ...]  # the model and the engine, as far as an iteration's length depends on them

    def believed(self, points: Sequence[Point], measure: Callable[[Point], float]) -> tuple[Sample, ...]:
        seconds = _checked(read_kept(self._path(points)), len(points))
        for point, kept in zip(points[:_TRIED_AGAIN], seconds, strict=False):
            if not _agrees(min(kept), partial(measure, point)):
                return ()
        return tuple(Sample(point.work, one) for point, all_s in zip(points, seconds, strict=False) for one in all_s)

    def keep(self, points: Sequence[Point], samples: Sequence[Sample]) -> None:
        seconds = [[one.seconds for one in samples if one.work == point.work] for point in points]
        if seconds[0]:
            keep(self._path(points), seconds)

    def _path(self, points: Sequence[Point]) -> Path:
        machine = (processor_name(), platform.node(), f"torch {torch.__version__}", f"kernels {built_at()}")
        return verdict_path(self.folder, _KIND, (*self.described, *machine, repr(points)))


def _agrees(kept_s: float, measure: Callable[[], float]) -> bool:
    for _ in range(_MOST_TRIES):
        again_s = measure()
        if again_s < kept_s * _MAX_RATIO:
            return again_s > kept_s / _MAX_RATIO
    return False


def _checked(found: Any, num_points: int) -> list[list[float]]:
    if not isinstance(found, list) or len(found) != num_points:
        return []
    for seconds in found:
        if not isinstance(seconds, list) or not all(isinstance(one, float) and 0.0 < one < 1e6 for one in seconds):
            return []
    return found if all(found[:_TRIED_AGAIN]) else []

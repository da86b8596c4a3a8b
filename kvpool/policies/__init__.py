"""Batch formers by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from alignedserve.core.errors import ConfigError
from kvpool.policies.batch_former import BatchFormer, ClassedBatchFormer, FcfsBatchFormer, TurnBatchFormer
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig


class _Builder(Protocol):
    def __call__(self, *, block_size: int, starvation_s: float) -> BatchFormer: ...


def _density_first(*, block_size: int, starvation_s: float) -> BatchFormer:
    return DensityFirstBatchFormer(DensityFirstConfig(starvation_s=starvation_s, block_size=block_size))


def _fcfs(*, block_size: int, starvation_s: float) -> BatchFormer:
    return FcfsBatchFormer()


BATCH_FORMERS: Mapping[str, _Builder] = MappingProxyType({"density_first": _density_first, "fcfs": _fcfs})


def make_batch_former(
    name: str, *, block_size: int, starvation_s: float, best_effort_floor: float | None = None
) -> BatchFormer:
    """Build the batch former of this name. Raises ConfigError listing the valid names.

    `best_effort_floor`: its share while real-time requests wait; None: classes are not known.
    """
    if name not in BATCH_FORMERS:
        raise ConfigError(f"batching.policy: unknown batch former {name!r}; known: {', '.join(sorted(BATCH_FORMERS))}")

    def make() -> BatchFormer:
        return TurnBatchFormer(BATCH_FORMERS[name](block_size=block_size, starvation_s=starvation_s))

    return make() if best_effort_floor is None else ClassedBatchFormer(make, floor=best_effort_floor)

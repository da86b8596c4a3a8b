"""Batch formers by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from alignedserve.core.errors import ConfigError
from kvpool.policies.batch_former import BatchFormer, ClassedBatchFormer, FcfsBatchFormer, TurnBatchFormer
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig

BATCH_FORMERS: Mapping[str, Callable[[float, int], BatchFormer]] = MappingProxyType(  # of starvation_s, block_size
    {
        "density_first": lambda *numbers: DensityFirstBatchFormer(DensityFirstConfig(*numbers)),
        "fcfs": lambda *_: FcfsBatchFormer(),
    }
)


def make_batch_former(
    name: str, *, block_size: int, starvation_s: float, best_effort_floor: float | None = None
) -> BatchFormer:
    """Build the batch former of this name. Raises ConfigError listing the valid names.

    `best_effort_floor`: its share while real-time requests wait; None: classes are not known.
    """
    if name not in BATCH_FORMERS:
        raise ConfigError(f"batching.policy: unknown batch former {name!r}; known: {', '.join(sorted(BATCH_FORMERS))}")

    def make() -> BatchFormer:
        return TurnBatchFormer(BATCH_FORMERS[name](starvation_s, block_size))

    return make() if best_effort_floor is None else ClassedBatchFormer(make, floor=best_effort_floor)

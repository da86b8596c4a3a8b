"""How the pool's logic is put together from its configuration, alike for the live pool and for the simulated one."""

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.messages.caches import ArenaOffered
from kvpool.logic import PoolLogic
from kvpool.policies import make_batch_former


def make_logic(
    *, config: PoolConfig, batching: BatchingConfig, arena: ArenaOffered, block_size: int, first_lease: int
) -> PoolLogic:
    """`first_lease` should differ from one life of a pool to the next. Raises ConfigError naming the field."""
    former = make_batch_former(
        batching.policy or "density_first", block_size=block_size, starvation_s=batching.starvation_s
    )
    return PoolLogic(
        arena=arena, block_size=block_size, batch_former=former, lease_s=config.lease_s, first_lease=first_lease
    )

"""Builds the pool's logic from its configuration, for the live pool and the simulated one."""

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.messages.caches import ArenaOffered
from kvpool.logic import PoolLogic
from kvpool.policies import make_batch_former
from kvpool.waiting_forms import LINK_WAIT_S


def make_logic(
    *,
    config: PoolConfig,
    batching: BatchingConfig,
    arena: ArenaOffered,
    block_size: int,
    first_lease: int,
    link_wait_s: float = LINK_WAIT_S,
    takes_requests: bool = True,
    state_blocks: int = 0,
) -> PoolLogic:
    """Build the logic; `first_lease` should differ after each restart. Raises ConfigError naming the field."""
    former = make_batch_former(
        batching.policy or "density_first",
        block_size=block_size,
        starvation_s=batching.starvation_s,
        best_effort_floor=batching.best_effort_floor,
    )
    return PoolLogic(
        arena=arena,
        block_size=block_size,
        batch_former=former,
        lease_s=config.lease_s,
        first_lease=first_lease,
        link_wait_s=link_wait_s,
        takes_requests=takes_requests,
        state_blocks=state_blocks,
        floor=batching.best_effort_floor or 0.0,
    )

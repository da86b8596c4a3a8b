"""Registration of a worker with the router."""

import msgspec

from alignedserve.config.sections import DecodeWorkerConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.model import PredictedSpeed
from alignedserve.messages.cluster_view import WorkerSpeed
from alignedserve.messages.workers import WorkerRegistered


def registration_of(
    layout: BlockLayout,
    num_blocks: int,
    max_running_requests: int,
    pool_name: str = "",
    *,
    node: str = "",
    can_prefill: bool = False,
    can_decode: bool = False,
    max_adapters: int = 0,
    num_active: int = 0,
) -> WorkerRegistered:
    """Build the registration of a worker with that many blocks.

    `pool_name`: the KV pool beside it, if it has one. `node`: where it runs, among several. `max_adapters`: of LoRA in
    its memory. `num_active`: see WorkerRegistered.
    """
    return WorkerRegistered(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_running_requests=max_running_requests,
        pool_name=pool_name,
        can_prefill=can_prefill,
        can_decode=can_decode,
        layout_digest=layout.digest().hex(),
        node=node,
        max_adapters=max_adapters,
        num_active=num_active,
        state_blocks=layout.state_blocks,
    )


def num_active(config: DecodeWorkerConfig) -> int:
    """Return how many workers of a node have work, where others stand by; 0: all have. `config`: of this node."""
    return config.count if config.standby else 0


def with_speed(registered: WorkerRegistered, speed: PredictedSpeed | None) -> WorkerRegistered:
    """Return the registration with what the worker measured; None: nothing."""
    return registered if speed is None else msgspec.structs.replace(registered, speed=WorkerSpeed(*speed))

"""The prefill worker as a Ray actor.

A cluster's driver names this class and computes nothing: what takes PyTorch is imported where an actor starts.
"""

import ray

from alignedserve.config.sections import EngineConfig, PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import ServedModel


@ray.remote
class PrefillWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        decoders: tuple[str, ...],
        num_far_decoders: int,
        served: ServedModel,
        prefix_cache: PrefixCacheConfig,
        process_spec: ProcessSpec,
    ) -> None:
        """`decoders`: names of the decode workers of this node; `num_far_decoders`: how many others have, at first."""
        from prefill_worker.service import start_prefill_worker

        arguments = (config, scheduling, engine_config, decoders, num_far_decoders, served, prefix_cache, process_spec)
        super().__init__(process_spec, lambda: start_prefill_worker(*arguments))

"""Decode workers and colocated workers as Ray actors.

A cluster's driver names these classes and computes nothing: what takes PyTorch is imported where an actor starts.
"""

import ray

from alignedserve.config.sections import (
    BatchingConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.core.plugins import load_plugin
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import ServedModel
from decode_worker.lending import Lending


@ray.remote
class DecodeWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        batching: BatchingConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        served: ServedModel,
        process_spec: ProcessSpec,
    ) -> None:
        from decode_worker.start import start_decode_worker

        arguments = (config, batching, scheduling, engine_config, served, process_spec)
        super().__init__(process_spec, lambda: start_decode_worker(*arguments))


@ray.remote
class ColocatedWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        served: ServedModel,
        lending: Lending | None,
        prefix_cache: PrefixCacheConfig,
        process_spec: ProcessSpec,
    ) -> None:
        """`lending`: None: requests do not move between workers."""
        from decode_worker.start import start_colocated_worker

        arguments = (config, scheduling, engine_config, served, lending, prefix_cache, process_spec)
        super().__init__(process_spec, lambda: start_colocated_worker(*arguments))


@ray.remote
class StageActor(ActorHost):
    """A stage of a worker of another host."""

    def __init__(self, process_spec: ProcessSpec) -> None:
        super().__init__(process_spec, lambda: load_plugin("stages").start_stage(process_spec))

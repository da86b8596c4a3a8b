"""Elastic workers, and stages of workers of other hosts, as Ray actors.

A cluster's driver names these classes and computes nothing: what takes PyTorch is imported where an actor starts.
"""

from typing import Any

import ray

from alignedserve.core.plugins import load_plugin
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec


@ray.remote
class ColocatedWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: of `start_colocated_worker`, its ProcessSpec last."""
        from alignedserve.worker_core.service import start_colocated_worker

        super().__init__(arguments[-1], lambda: start_colocated_worker(*arguments))


@ray.remote
class StageActor(ActorHost):
    """A stage of a worker of another host."""

    def __init__(self, process_spec: ProcessSpec) -> None:
        super().__init__(process_spec, lambda: load_plugin("stages").start_stage(process_spec))

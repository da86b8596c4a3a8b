"""The prefill worker as a Ray actor.

A cluster's driver names this class and computes nothing: what takes PyTorch is imported where an actor starts.
"""

from typing import Any

import ray

from alignedserve.process.actor_host import ActorHost


@ray.remote
class PrefillWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: of `start_prefill_worker`, its ProcessSpec last."""
        from prefill_worker.service import start_prefill_worker

        super().__init__(arguments[-1], lambda: start_prefill_worker(*arguments))

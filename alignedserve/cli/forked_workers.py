"""What the processes of a cluster on one host have loaded before they are forked."""

import contextlib
from collections.abc import Iterator

from alignedserve.cluster.local_ray.worker_template import TemplateLoads, WorkerTemplate
from alignedserve.config.environment import ray_address

# In the order in which they are wanted: a worker has a model to load, and all else waits for that.
_OF_WORKERS = ("torch", "decode_worker.service", "prefill_worker.service", "kvpool.service", "router.service")
_OF_GATEWAYS = ("starlette.applications", "alignedserve.api.endpoints", "alignedserve.gateway.start")
_OF_BATCHES = ("alignedserve.batch_worker.service",)
_LOADS = TemplateLoads(
    (*_OF_WORKERS, *_OF_GATEWAYS, *_OF_BATCHES),
    num_early=2,  # a router and a worker, which Ray starts first
    early_at=len(_OF_WORKERS),
)


@contextlib.contextmanager
def forked_workers(*, is_wanted: bool = True) -> Iterator[WorkerTemplate | None]:
    """Yield the template of the processes of a cluster that starts here, killed at the end; None: Ray starts them.
    `is_wanted`: False: no cluster starts here."""
    template = WorkerTemplate.fork(_LOADS) if is_wanted and ray_address() is None else None
    try:
        yield template
    finally:
        if template is not None:
            template.stop()

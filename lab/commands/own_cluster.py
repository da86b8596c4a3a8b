"""The cluster of a command: it lives while the command runs."""

import contextlib
import time
from collections.abc import Iterator

from alignedserve.cli.console import notes
from alignedserve.cli.wiring import start_cluster
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.config.model_settings import ModelSettings
from alignedserve.process.addresses import free_ports

_READY_TIMEOUT_S = 120.0


@contextlib.contextmanager
def own_cluster(
    settings: ModelSettings, template: WorkerTemplate | None, *, called: str = "cluster"
) -> Iterator[ServingCluster]:
    """Run a cluster, ready and announced, of processes that the template forks, as long as the context.

    Raises an error of the tree, with nothing left running.
    """
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        with notes().status(f"starting a {called}"):
            cluster = stack.enter_context(start_cluster(settings, template=template))
            cluster.wait_ready(_READY_TIMEOUT_S)
        notes().print(f"{called} ready at {cluster.url} after {time.monotonic() - began_s:.1f} s", markup=False)
        yield cluster


def on_free_port() -> str:
    return f"gateway.port={free_ports(1)[0]}"

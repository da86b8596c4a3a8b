"""Wiring of gateway and batch worker to the cluster: only the CLI knows both."""

from alignedserve.batch_worker.actor import BatchActor
from alignedserve.cluster.actor_factory import ActorClasses
from alignedserve.cluster.launch import Hosts, launch_cluster, launch_on_hosts
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.nodes.plan import NODE_ADDRESS
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.cluster.starting import StartObserver
from alignedserve.config.environment import RAY_ADDRESS_VARIABLE, ray_address
from alignedserve.config.model_settings import ModelSettings
from alignedserve.core.errors import ConfigError
from alignedserve.gateway.actor import GatewayActor


def start_cluster(
    settings: ModelSettings,
    observer: StartObserver | None = None,
    num_nodes: int | None = None,
    template: WorkerTemplate | None = None,
) -> ServingCluster:
    """Start a cluster with our HTTP gateway: on this host, or on the nodes of the Ray cluster that RAY_ADDRESS names.
    `num_nodes`: to wait for. `template`: of the processes of a cluster on this host. Raises an error of the tree, with
    nothing left running."""
    address, classes = ray_address(), ActorClasses(GatewayActor, BatchActor)
    config = settings.configs[0]
    if address is not None:
        return launch_on_hosts(settings, Hosts(address, num_nodes or 1), classes, observer)
    if num_nodes is not None:
        raise ConfigError(f"--nodes is for a Ray cluster: set {RAY_ADDRESS_VARIABLE} to its address, or to auto")
    if config.gateway.host == NODE_ADDRESS:
        raise ConfigError(f"gateway.host={NODE_ADDRESS} is for a Ray cluster; on one host give an address")
    return launch_cluster(settings, classes, observer, template)

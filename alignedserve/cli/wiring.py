"""Wiring of gateway and batch worker to the cluster: only the CLI knows both."""

from alignedserve.batch_worker.actor import BatchActor
from alignedserve.cluster.actor_factory import ActorClasses
from alignedserve.cluster.launch import RunningCluster, launch_cluster
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.config.sections import ClusterConfig
from alignedserve.gateway.actor import GatewayActor


def start_cluster(config: ClusterConfig, observer: StartObserver | None = None) -> RunningCluster:
    """Start a cluster with our HTTP gateway. Raises an error of the tree, with nothing left running."""
    return launch_cluster(config, ActorClasses(GatewayActor, BatchActor), observer)

"""Where the doors are joined to the cluster: the CLI is the only floor that sees both."""

from alignedserve.batch_worker.actor import BatchActor
from alignedserve.cluster.launch import ActorClasses, RunningCluster, launch_cluster
from alignedserve.config.sections import ClusterConfig
from alignedserve.gateway.actor import GatewayActor


def start_cluster(config: ClusterConfig) -> RunningCluster:
    """Start a cluster with our HTTP gateway. Raises an error of the tree, with nothing left running."""
    return launch_cluster(config, ActorClasses(GatewayActor, BatchActor))

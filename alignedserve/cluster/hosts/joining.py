"""Prepares nodes that join a running cluster."""

from alignedserve.cluster.hosts.admission import Admission, differences, start_keepers
from alignedserve.cluster.hosts.members import Member, member_of, reserve_for, resources_of
from alignedserve.cluster.hosts.plan import ClusterPlan, node_config, plan_joining
from alignedserve.cluster.hosts.ray_nodes import RayNode
from alignedserve.cluster.placement import NodeShare
from alignedserve.core.errors import ResourceError
from alignedserve.runtime.engine.model_executor import bytes_beside_blocks


class Joining:
    """Gives nodes their shares: that of a former node of the same host, or one of their own."""

    def __init__(self, plan: ClusterPlan, cluster_id: str, num_nodes: int) -> None:
        """`num_nodes`: that the cluster was started with."""
        self._plan = plan
        self._cluster_id = cluster_id
        self._vacant: dict[tuple[str, str], NodeShare] = {}  # of hosts that are gone, for when they come back
        self._num_nodes = self._num_folders = num_nodes

    def vacate(self, member: Member) -> None:
        """Keep the share of a node that is gone for the next one of its host."""
        self._vacant[_host(member.ray_node)] = member.prepared.share

    def take(self, node: RayNode) -> None:
        """Note that this node has its actors, and its share is vacant no more."""
        del self._vacant[_host(node)]

    def prepare(self, node: RayNode, head: RayNode) -> Member:
        """Examine a node and make it ready for its actors. Raises an error of the tree when it cannot be used."""
        config, served = self._plan.config, self._plan.served
        with Admission((head, node)) as admission:
            reports = admission.reports(config.engine.device, served.folder)
            found = differences({node: reports[node]}, reports[head])
            if found:
                raise ResourceError(found[node])
            resources = resources_of(f"node-{self._num_nodes}", node, reports[node])
            share = self._vacant.get(_host(node))
            if share is None:
                share = self._vacant[_host(node)] = self._plan.placement.join(resources.capacity)
                self._num_nodes += 1
            sized = plan_joining(
                self._plan,
                share,
                resources.machine,
                bytes_beside_blocks(served, config.scheduling, config.engine.block_size),
            )
            self._num_folders += 1
            folder_name = f"{self._cluster_id}-{self._num_folders}"
            keeper = start_keepers({node: folder_name}, self._cluster_id, config.links)[node]
            member = member_of(node, share, resources.capacity, node_config(sized, share, node.address), keeper)
            admission.check({node: member.prepared}, served)
        reserve_for([member])
        return member


def _host(node: RayNode) -> tuple[str, str]:
    return node.hostname, node.address

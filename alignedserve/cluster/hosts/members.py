"""The nodes of a running cluster, each with what it has and what runs there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from alignedserve.cluster.actor_factory import BATCHES, PreparedNode
from alignedserve.cluster.hosts.admission import Keeper, keeper_name
from alignedserve.cluster.hosts.nodes.placement_group import NodeGroup, create_group, is_placed, release, worker_shares
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.recorded_parts import parts_folder
from alignedserve.cluster.hosts.nodes.report import NodeReport
from alignedserve.cluster.hosts.plan import NodeResources
from alignedserve.cluster.hosts.record import DRAINED, DRAINING, ActorRecord, NodeRecord
from alignedserve.cluster.placement import NodeCapacity, NodeShare, engines_of
from alignedserve.cluster.recording_folder import recording_into
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ResourceError
from alignedserve.runtime.process.addresses import ROUTER

DRIVER = "driver"
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104


@dataclass(slots=True)
class Member:
    """A node of the cluster."""

    ray_node: RayNode
    prepared: PreparedNode
    keeper: Keeper

    @property
    def name(self) -> str:
        """Return its name in the cluster."""
        return self.prepared.share.node

    def without_keeper(self) -> "Member":
        """Return it as it is handed from one driver to the next."""
        return replace(self, keeper=replace(self.keeper, actor=None))

    def use(self, group: NodeGroup) -> None:
        """Place its processes in this group."""
        self.prepared = replace(self.prepared, options_of=group.options_of)


def member_of(node: RayNode, share: NodeShare, capacity: NodeCapacity, config: ClusterConfig, keeper: Keeper) -> Member:
    """Return the member that this node is, ready for its actors."""
    if config.recording.folder is not None and not share.is_head:  # the driver copies it from there
        config = recording_into(config, parts_folder(keeper.book.folder))
    return Member(node, PreparedNode(share, capacity, config, keeper.book), keeper)


def group_for(member: Member) -> NodeGroup:
    """Create the group of a node. It is placed when Ray has what the workers take."""
    node, prepared = member.ray_node, member.prepared
    shares = worker_shares(prepared.share, prepared.config.engine, prepared.capacity, node.num_cpus)
    return create_group(node, prepared.folder.name, shares)


def reserve_for(members: Sequence[Member]) -> None:
    """Reserve what the nodes' workers take. Raises ResourceError, with nothing reserved, where Ray has not as much."""
    groups = [group_for(member) for member in members]
    for member, group in zip(members, groups, strict=True):
        if not is_placed(group):
            for other in members:
                release(other.prepared.folder.name)
            raise ResourceError(f"{member.ray_node}: Ray has not {group} free there; does another job use it?")
        member.use(group)


def expect_handoffs(members: Sequence[Member]) -> None:
    """Tell each node's prefill workers how many decode workers the others have, to lend each as much memory."""
    shares = [member.prepared.share for member in members]
    for member in members:
        num_far_decode = sum(len(share.decode) for share in shares if share is not member.prepared.share)
        member.prepared = replace(member.prepared, num_far_decode=num_far_decode)


def resources_of(name: str, node: RayNode, report: NodeReport) -> NodeResources:
    """Return what this node, by its report, has for a share of this name."""
    assert report.machine is not None, "a node without a report of its memory"
    gpus = report.gpus[: int(node.num_gpus)]  # the others are not Ray's to give
    return NodeResources(NodeCapacity(name, node.address, report.machine.num_cores, gpus), report.machine)


def drained_record(member: Member) -> NodeRecord:
    """Return what the record of the cluster says of this node, whose processes have ended."""
    node = member.ray_node
    return NodeRecord(member.name, node.node_id, node.address, node.hostname, drain=DRAINED)


def record_of(
    member: Member, *, is_draining: bool = False, problems: Mapping[str, str] = MappingProxyType({})
) -> NodeRecord:
    """Return what the record of the cluster says of this node. `problems`: of processes that do not serve."""
    node, share, config = member.ray_node, member.prepared.share, member.prepared.config
    engines = engines_of(share, config.engine, member.prepared.capacity)
    devices = {
        name: engine.device if engine.device != "cpu" else f"{engine.threads_per_worker} threads"
        for name, engine in engines.items()
    }
    of_head = [DRIVER, ROUTER, *([BATCHES] if config.batches.enabled else [])]
    others = [
        *(of_head if share.is_head else []),
        *([share.pool_name] if share.num_workers and config.node_pool is not None else []),
    ]
    host = node.address if config.gateway.host in _ALL_ADDRESSES else config.gateway.host
    reachable = f"[{host}]" if ":" in host else host
    return NodeRecord(
        name=share.node,
        node_id=node.node_id,
        address=node.address,
        hostname=node.hostname,
        keeper=keeper_name(member.prepared.folder.name),
        actors=tuple(
            ActorRecord(name, devices.get(name, ""), problems.get(name, ""))
            for name in (*others, *(name for name, _ in share.gateways), *devices)
        ),
        urls=tuple(f"http://{reachable}:{port}" for _, port in share.gateways),
        drain=DRAINING if is_draining else "",
    )

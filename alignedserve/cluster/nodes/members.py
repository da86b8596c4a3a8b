"""The nodes of a running cluster with their resources and processes, and the served models."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alignedserve.cluster.actor_factory import BATCHES, PreparedNode
from alignedserve.cluster.deployments.planning import HeldMemory, holding_of
from alignedserve.cluster.hosts.record import DRAINING, ActorRecord, NodeRecord
from alignedserve.cluster.nodes.admission import Agent, NodeReport, agent_name
from alignedserve.cluster.nodes.plan import ClusterPlan, NodePart, NodeResources
from alignedserve.cluster.nodes.ray_nodes import (
    NodeGroup,
    RayNode,
    WorkerShare,
    create_group,
    is_placed,
    release,
    worker_shares,
)
from alignedserve.cluster.placement import NodeCapacity, NodeShare, engines_of
from alignedserve.cluster.recording_folder import parts_folder, recording_into
from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import ResourceError
from alignedserve.process.addresses import deployment_of
from alignedserve.runtime.model.served_model import ServedModel

DRIVER = "driver"
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104


@dataclass(slots=True)
class Member:
    """A node of the cluster. Its part of each deployment is a PreparedNode: of the first one that which has the
    gateways as well, also when that deployment has ended."""

    ray_node: RayNode
    prepared: PreparedNode
    agent: Agent
    others: dict[str, PreparedNode] = field(default_factory=dict)  # parts of further deployments, by id
    placed: Mapping[str, WorkerShare] = field(default_factory=dict)  # what its workers take of its placement group

    @property
    def name(self) -> str:
        return self.prepared.share.node

    @property
    def parts(self) -> tuple[PreparedNode, ...]:
        return (self.prepared, *self.others.values())

    @property
    def models(self) -> dict[str, PreparedNode]:
        return {part.share.deployment_id: part for part in self.parts if part.share.has_model}

    @property
    def shares(self) -> tuple[NodeShare, ...]:
        return tuple(part.share for part in self.parts)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.share.workers)

    def part_of(self, process: str) -> PreparedNode:
        return self.others.get(deployment_of(process), self.prepared)

    def set_part(self, prepared: PreparedNode) -> None:
        if prepared.share.deployment_id == self.prepared.share.deployment_id:
            self.prepared = prepared
        else:
            self.others[prepared.share.deployment_id] = prepared

    def remove_model(self, deployment_id: str) -> None:
        self.others.pop(deployment_id, None)
        if deployment_id == self.prepared.share.deployment_id:
            self.prepared = replace(self.prepared, share=self.prepared.share.without_model())

    def use(self, group: NodeGroup) -> None:
        self.placed = group.shares
        for part in self.parts:
            self.set_part(replace(part, options_of=group.options_of))


def member_of(node: RayNode, parts: Sequence[NodePart], agent: Agent) -> Member:
    """Return the member that this node is, ready for its actors. `parts`: that with the gateways first."""
    prepared = [PreparedNode(share, capacity, config, agent.book) for share, capacity, config in parts]
    first = prepared[0]
    if first.config.recording.folder is not None and not first.share.is_head:  # the driver copies it from there
        prepared[0] = replace(first, config=recording_into(first.config, parts_folder(agent.book.folder)))
    return Member(node, prepared[0], agent, {part.share.deployment_id: part for part in prepared[1:]})


def group_for(member: Member) -> NodeGroup:
    node, engines = member.ray_node, dict[str, EngineConfig]()
    for part in member.parts:
        engines |= engines_of(part.share, part.config.engine, part.capacity)
    return create_group(node, member.prepared.folder.name, worker_shares(engines, node.num_cpus))


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
    num_decode = Counter[str]()
    for member in members:
        for deployment_id, part in member.models.items():
            num_decode[deployment_id] += len(part.share.decode)
    for member in members:
        for deployment_id, part in member.models.items():
            member.set_part(replace(part, num_far_decode=num_decode[deployment_id] - len(part.share.decode)))


def resources_of(name: str, node: RayNode, report: NodeReport) -> NodeResources:
    assert report.machine is not None, "a node without a report of its memory"
    gpus = report.gpus[: int(node.num_gpus)]  # the others are not Ray's to give
    return NodeResources(NodeCapacity(name, node.address, report.machine.num_cores, gpus), report.machine)


def record_of(
    member: Member, *, is_draining: bool = False, problems: Mapping[str, str] = MappingProxyType({})
) -> NodeRecord:
    """Return what the record of the cluster says of this node. `problems`: of processes that do not serve."""
    node, share, config = member.ray_node, member.prepared.share, member.prepared.config
    devices: dict[str, str] = {}
    routers, pools = [], []
    stages = list[str]()
    for part in member.models.values():
        engines = engines_of(part.share, part.config.engine, part.capacity)
        devices |= {
            name: engine.device if engine.device != "cpu" else f"{engine.threads_per_worker} threads"
            for name, engine in engines.items()
        }
        routers.append(part.share.router)
        stages += part.share.stages
        if part.share.num_workers and part.config.node_pool is not None:
            pools.append(part.share.pool_name)
    of_head = [DRIVER, *routers, *([BATCHES] if config.batches.enabled else [])]
    others = [*(of_head if share.is_head else []), *pools]
    host = node.address if config.gateway.host in _ALL_ADDRESSES else config.gateway.host
    reachable = f"[{host}]" if ":" in host else host
    return NodeRecord(
        name=share.node,
        node_id=node.node_id,
        address=node.address,
        hostname=node.hostname,
        agent=agent_name(member.prepared.folder.name),
        actors=tuple(
            ActorRecord(name, devices.get(name, ""), problems.get(name, ""))
            for name in (*others, *(name for name, _ in share.gateways), *devices, *stages)
        ),
        urls=tuple(f"{config.gateway.scheme}://{reachable}:{port}" for _, port in share.gateways),
        drain=DRAINING if is_draining else "",
    )


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One deployment; Member has the part of each node."""

    plan: ClusterPlan
    own: Mapping[str, Any]  # sections of its settings, which win over those of all models
    digest: str | None  # of the head's copy

    @property
    def served(self) -> ServedModel:
        return self.plan.served

    @property
    def folder(self) -> Path:
        return self.plan.served.folder


def holdings_of(members: Iterable[Member], models: Mapping[str, HostedModel]) -> dict[str, list[HeldMemory]]:
    return {
        member.name: [
            holding_of(part.share.config_of(part.config), models[deployment_id].served, part.capacity.gpus)
            for deployment_id, part in member.models.items()
            if part.share.num_workers and deployment_id in models
        ]
        for member in members
    }

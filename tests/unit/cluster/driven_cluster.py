"""A cluster of two nodes as its driver holds it, none of whose actors exist."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.deployments.logic import DeploymentsLogic
from alignedserve.cluster.hosts.ray_directory import RayDirectory
from alignedserve.cluster.hosts.succession import Succession
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import Agent, NodeAdmission
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.nodes.plan import NodeResources, plan_cluster
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.cluster.serving_cluster import DriverSetup, ServingCluster
from alignedserve.cluster.starting import LoggingObserver
from alignedserve.config.model_settings import ModelSettings
from alignedserve.config.sections import MIB, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.process.addresses import AddressBook
from alignedserve.runtime.model.served_model import resolve_model

POCKET = resolve_model(ModelSectionConfig())
NODES = [RayNode(f"id-{index}", f"10.0.0.{index}", f"host-{index}", is_head=index == 0) for index in range(3)]


class AgentMemory:
    """A agent in this process."""

    def __init__(self) -> None:
        self.copies: list[bytes] = []
        self.number = 0  # of the last copy
        self.num_heard = 0
        self.keep = SimpleNamespace(remote=self._keep)
        self.hear = SimpleNamespace(remote=self._hear)

    def _keep(self, number: int, copy: bytes, *others: object) -> None:
        self.number = number
        self.copies.append(copy)

    def _hear(self, number: int) -> tuple[str, bool]:
        """Return a name of this call, and its result."""
        self.num_heard += 1
        return f"{id(self)}-{self.num_heard}", self.number == number


def joined(folder: Path, settings: dict[str, Any]) -> tuple[Joining, list[Member]]:
    """Return two nodes, none of whose actors exist."""
    found = [
        NodeResources(NodeCapacity(f"node-{index}", node.address, 4), Machine(8192 * MIB, 4096 * MIB, 4, False))
        for index, node in enumerate(NODES[:2])
    ]
    plan = plan_cluster(from_mapping(settings), POCKET, found)
    members = []
    for node, one, share in zip(NODES, found, plan.shares, strict=False):
        book = AddressBook(folder / f"c-{share.node}", node.node_id, node.address, RayDirectory("c"))
        book.folder.mkdir(parents=True)
        prepared = PreparedNode(share, one.capacity, plan.config_of(share, node.address), book)
        members.append(Member(node, prepared, Agent(AgentMemory(), book)))
    return Joining(plan, {"": HostedModel(plan, {"model": {}}, None)}, "c", 2), members


def started(folder: Path, settings: dict[str, Any], logic: DeploymentsLogic | None = None) -> ServingCluster:
    """Return a cluster of two nodes, none of whose actors exist. `logic`: of a former driver."""
    made, members = joined(folder, settings)
    made.logic = logic or made.logic
    factory = ActorFactory(POCKET, ActorClasses(None, None))
    common = ModelSettings({}, ({},))
    setup = DriverSetup(common, NodeAdmission, LoggingObserver(), succession=Succession("asked"))
    return ServingCluster(made, members, factory, setup)

"""Plans one more deployment of a cluster of hosts: its settings, its nodes, its parts of what they have left."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparation import DeploymentSettings
from alignedserve.cluster.hosts.admission import Admission, OwnHost, missing_copies
from alignedserve.cluster.hosts.members import HostedModel, Member, holdings_of, resources_of
from alignedserve.cluster.hosts.models.planning import PlannedModel, plan_one_more
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.report import NodeReport
from alignedserve.cluster.hosts.plan import ClusterPlan, NodeResources, resolve_for
from alignedserve.cluster.memory_planner import Machine
from alignedserve.core.errors import PeerLost, ResourceError
from alignedserve.runtime.device.devices import AUTO
from alignedserve.runtime.device_check.choice import DeviceChoice, with_device
from alignedserve.runtime.lora.adapter_folders import with_adapters
from alignedserve.scheduling.factory import resolve_policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedPlan:
    """A deployment whose processes may be created."""

    model: HostedModel
    parts: Mapping[str, PreparedNode]  # by the name of the node
    remarks: tuple[str, ...] = ()  # for who has ordered it


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The cluster as an order finds it."""

    members: tuple[Member, ...]  # that do not drain, the head first
    models: Mapping[str, HostedModel]
    wholes: Mapping[str, Machine]  # each node before its first model, by name


Examine = Callable[[Sequence[RayNode]], Admission | OwnHost]  # examines these nodes, or the one that there is


class HostedPreparing:
    """Prepares deployments, one at a time, on any thread."""

    def __init__(self, settings: DeploymentSettings, examine: Examine) -> None:
        self.settings = settings
        self._examine = examine

    def prepare(
        self, deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None, around: Surroundings
    ) -> HostedPlan:
        """Plan the deployment that an order asks for, beside what is there.

        Takes as long as its download on the head, if it is on a hub; other nodes need their copy before. Raises
        ConfigError, ModelError, ResourceError or PeerLost.
        """
        own, config = self.settings.of_order(order, replaced)
        device = next(iter(around.models.values())).plan.config.engine.device
        if config.engine.device == AUTO:  # means what it meant at the start
            config = with_device(config, DeviceChoice(device))
        config = resolve_policy(config)
        members = {member.ray_node: member for member in around.members}
        folder = resolve_for([], config).folder
        with self._examine(list(members)) as admission:
            reports = admission.reports_that_come(config.engine.device, [folder])
            head = reports.get(around.members[0].ray_node)
            if head is None:
                raise PeerLost(f"{around.members[0].ray_node} does not answer")
            found = {
                node: resources_of(members[node].name, node, report)
                for node, report in reports.items()
                if report.problem is None and report.machine is not None
            }
            served = with_adapters(resolve_for([one.machine for one in found.values()], config), config.lora)
            self.settings.require_apart(served, config, replaced)
            model = PlannedModel(deployment_id, config, served, _with_copies(found, reports, head))
            plan = self._plan(model, list(found.values()), around)
            parts = _parts(plan, found, members)
            checked = {node: parts[members[node].name] for node in found if members[node].name in parts}
            admission.check(checked, plan.served)
        noted = self.settings.note(deployment_id, own, plan.served)
        hosted = HostedModel(plan, noted, head.digests[0])
        if replaced is None:
            return HostedPlan(hosted, parts)
        return HostedPlan(hosted, parts, self.settings.carry_adapters(replaced, deployment_id, plan.served))

    def _plan(self, model: PlannedModel, nodes: Sequence[NodeResources], around: Surroundings) -> ClusterPlan:
        taken = Counter({member.name: len(member.workers) for member in around.members})
        plan = plan_one_more(model, nodes, holdings_of(around.members, around.models), taken, around.wholes)
        for choice in plan.choices.values():
            preflight.check_configuration(choice.config, plan.served)
        return plan


def _with_copies(
    found: Mapping[RayNode, NodeResources], reports: Mapping[RayNode, NodeReport], head: NodeReport
) -> frozenset[str]:
    """Return the names of the nodes that have the head's copy of the model. Raises ResourceError for the head."""
    if head.problem is not None or head.digests[0] is None:
        raise ResourceError(str(head.problem or "the head has no copy of the model"))
    return frozenset(
        one.capacity.name for node, one in found.items() if not missing_copies(reports[node], head.digests)
    )


def _parts(
    plan: ClusterPlan, found: Mapping[RayNode, NodeResources], members: Mapping[RayNode, Member]
) -> dict[str, PreparedNode]:
    """Return the parts of the nodes that have one: workers, or on the head the router."""
    parts = {}
    for index, node in enumerate(found):
        share, capacity, config = plan.part(index, node.address)
        if share.num_workers or share.is_head:
            member = members[node]
            parts[member.name] = PreparedNode(
                share, capacity, config, member.keeper.book, options_of=member.prepared.options_of, joins_others=True
            )
    return parts

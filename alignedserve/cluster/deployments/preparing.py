"""Plans one more deployment of a cluster: settings, nodes, and a part of each node's free resources."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.planning import PlannedModel, plan_one_more
from alignedserve.cluster.memory_planner import Machine, with_block_size
from alignedserve.cluster.nodes.admission import NodeAdmission, NodeReport, OwnHost, missing_copies
from alignedserve.cluster.nodes.members import HostedModel, Member, holdings_of, resources_of
from alignedserve.cluster.nodes.plan import ClusterPlan, NodeResources, resolve_for
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.config.model_settings import ModelSettings, name_of, require_adapters_apart
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AdapterError, ConfigError, PeerLost, ResourceError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.device.devices import AUTO
from alignedserve.runtime.device_check.choice import DeviceChoice, with_device
from alignedserve.runtime.lora.loaded_adapters import (
    carry_over,
    loaded_file,
    read_loaded,
    settle_carried,
    with_adapters,
)
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import require_effect, resolve_policy


class DeploymentSettings:
    """The settings of the deployments of one cluster, by which one more is checked."""

    def __init__(self, common: ModelSettings, sections: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        """`sections`: of the settings of each deployment that serves, by its id. `folder`: private, of the head."""
        self._common = common
        self._own = dict(sections)
        self._folder = folder

    def of_order(self, order: AddModel | ReplaceModel, replaced: str | None) -> tuple[Mapping[str, Any], ClusterConfig]:
        """Return the own sections of a deployment that is ordered, and its configuration with a model of this machine.
        Downloads the model first if it is on a hub. Raises ConfigError or ModelError."""
        like = self._own.get(replaced) if replaced is not None else None
        sections = self._common.another(order.path, order.name, order.settings, like)
        (config,) = self._common.with_models([sections]).configs
        if config.recording.folder is not None:
            raise ConfigError("recording.folder is for one model from start to end; serve without it to change models")
        require_effect(config)
        return sections, msgspec.structs.replace(config, model=with_local_model(config.model))

    def require_apart(
        self, served: ServedModel, config: ClusterConfig, replaced: str | None, asleep: Sequence[ServedModel] = ()
    ) -> None:
        """Refuse names of other models and of their adapters. Raises ConfigError, AdapterError. `asleep`: other
        models, which have no deployment."""
        names = set(_names_of(served))
        for other in asleep:
            twice = next((name for name in _names_of(other) if name in names), None)
            if twice is not None:
                raise ConfigError(
                    f"{twice} is a name of {other.name}, a model on demand; remove that, or name it apart"
                )
        for key, settings in tuple(self._own.items()):
            twice = next((name for name in read_loaded(self._loaded(key)) if name in names), None)
            if key != replaced and twice is not None:
                raise ConfigError(f"{twice} is the name of an adapter that was loaded for {name_of(settings)}")
        require_adapters_apart({**self._beside(served.name, replaced), served.name: config})

    def note(self, deployment_id: str, sections: Mapping[str, Any], served: ServedModel) -> Mapping[str, Any]:
        """Note a deployment that may be started; return its sections, with the name of its model."""
        self._own[deployment_id] = {**sections, "model": {**sections["model"], "served_model_name": served.name}}
        return self._own[deployment_id]

    def forget(self, deployment_id: str) -> None:
        self._own.pop(deployment_id, None)

    def carry_adapters(self, former: str, deployment_id: str, served: ServedModel) -> tuple[str, ...]:
        return carry_over(self._loaded(former), self._loaded(deployment_id), served)

    def loaded_adapters(self, deployment_id: str) -> tuple[LoraAdapter, ...]:
        try:
            return tuple(read_loaded(self._loaded(deployment_id)).values())
        except AdapterError:
            return ()  # the gateways' logs say why

    def settle_adapters(self, replaced: str, deployment_id: str) -> tuple[str, ...]:
        """Unload from a replacement what was unloaded since it was prepared; return the adapters that it lacks."""
        return settle_carried(self._loaded(replaced), self._loaded(deployment_id))

    def _loaded(self, deployment_id: str) -> Path:
        return loaded_file(self._folder, deployment_id)

    def _beside(self, name: str, replaced: str | None) -> dict[str, ClusterConfig]:
        others = [settings for key, settings in self._own.items() if key != replaced and name_of(settings) != name]
        return {name_of(settings): self._common.with_models([settings]).configs[0] for settings in others}


def _names_of(served: ServedModel) -> list[str]:
    return [served.name, *served.aliases, *(adapter.name for adapter in served.adapters)]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedPlan:
    """A deployment whose processes may be created."""

    model: HostedModel
    parts: Mapping[str, PreparedNode]  # by the name of the node
    remarks: tuple[str, ...] = ()  # for who has ordered it


class Asleep(NamedTuple):
    """The models on demand that have no processes, as an order finds them."""

    others: tuple[ServedModel, ...] = ()  # without the ordered model
    former: str | None = None  # last deployment of the ordered model; None: it was never awake


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The cluster as an order finds it."""

    members: tuple[Member, ...]  # that do not drain, the head first
    models: Mapping[str, HostedModel]
    wholes: Mapping[str, Machine]  # each node before its first model, by name
    device: str  # that engine.device=auto meant at the start
    asleep: Asleep = field(default_factory=Asleep)


Examine = Callable[[Sequence[RayNode]], NodeAdmission | OwnHost]  # examines these nodes, or the one that there is


class HostedPreparing:
    """Prepares deployments, one at a time, on any thread."""

    def __init__(self, settings: DeploymentSettings, examine: Examine) -> None:
        self.settings = settings
        self._examine = examine

    def prepare(
        self, deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None, around: Surroundings
    ) -> HostedPlan:
        """Plan the deployment of an order beside the present ones. Takes as long as its download on the head,
        if it is on a hub; other nodes need their copy before. Raises ConfigError, ModelError, ResourceError or
        PeerLost."""
        sections, config = self.settings.of_order(order, replaced)
        if config.engine.device == AUTO:
            config = with_device(config, DeviceChoice(around.device))
        config = resolve_policy(config)
        members = {member.ray_node: member for member in around.members}
        folder = resolve_for([], config).folder
        with self._examine(list(members)) as admission:
            reports = admission.reports_that_come(config.engine.device, [folder])
            head = reports.get(around.members[0].ray_node)
            if head is None:
                raise PeerLost(f"{around.members[0].ray_node} does not answer")
            resources = {
                node: resources_of(members[node].name, node, report)
                for node, report in reports.items()
                if report.problem is None and report.machine is not None
            }
            served = with_adapters(
                resolve_for([resource.machine for resource in resources.values()], config), config.lora
            )
            self.settings.require_apart(served, config, replaced, around.asleep.others)
            config = with_block_size(config, served)
            model = PlannedModel(deployment_id, config, served, _with_copies(resources, reports, head))
            plan = self._plan(model, list(resources.values()), around)
            parts = _parts(plan, resources, members)
            checked = {node: parts[members[node].name] for node in resources if members[node].name in parts}
            admission.check(checked, plan.served)
        noted = self.settings.note(deployment_id, sections, plan.served)
        hosted = HostedModel(plan, noted, head.digests[0])
        former = around.asleep.former if replaced is None else replaced
        if former is None:
            return HostedPlan(hosted, parts)
        return HostedPlan(hosted, parts, self.settings.carry_adapters(former, deployment_id, plan.served))

    def _plan(self, model: PlannedModel, nodes: Sequence[NodeResources], around: Surroundings) -> ClusterPlan:
        taken = Counter({member.name: len(member.workers) for member in around.members})
        plan = plan_one_more(model, nodes, holdings_of(around.members, around.models), taken, around.wholes)
        for choice in plan.choices.values():
            preflight.check_configuration(choice.config, plan.served)
        return plan


def _with_copies(
    by_node: Mapping[RayNode, NodeResources], reports: Mapping[RayNode, NodeReport], head: NodeReport
) -> frozenset[str]:
    if head.problem is not None or head.digests[0] is None:
        raise ResourceError(str(head.problem or "the head has no copy of the model"))
    return frozenset(
        resource.capacity.name for node, resource in by_node.items() if not missing_copies(reports[node], head.digests)
    )


def _parts(
    plan: ClusterPlan, by_node: Mapping[RayNode, NodeResources], members: Mapping[RayNode, Member]
) -> dict[str, PreparedNode]:
    parts = {}
    for index, node in enumerate(by_node):
        share, capacity, config = plan.part(index, node.address)
        if share.num_workers or share.is_head:
            member = members[node]
            parts[member.name] = PreparedNode(
                share, capacity, config, member.agent.book, options_of=member.prepared.options_of, joins_others=True
            )
    return parts

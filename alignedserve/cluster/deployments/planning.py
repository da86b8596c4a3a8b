"""Plans the deployments of a cluster of hosts: which nodes work for which model, and with which sizes. Pure."""

import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from alignedserve.cluster.deployments.division import (
    AssignableModel,
    AssignableNode,
    HeldMemory,
    MachinePart,
    assign_models,
    assigned_gpus,
    divide,
    holding_of,
    left_of,
    require_room,
    worker_bytes,
)
from alignedserve.cluster.memory_planner import ENOUGH_CONTEXT_LEN, LEAST_CONTEXT_LEN, Machine
from alignedserve.cluster.nodes.plan import ClusterPlan, NodeResources, choose_share, plan_cluster, sized_plan
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, NodeShare
from alignedserve.config.sections import ClusterConfig
from alignedserve.config.unset_sizes import DefaultSize
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.model.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that is to be placed."""

    deployment_id: str
    config: ClusterConfig  # with its topology
    served: ServedModel
    nodes: frozenset[str]  # that have a copy of it, by name

    @property
    def num_workers(self) -> int | None:
        """Return the fewest workers of a kind that are set; None: they follow the nodes."""
        kinds = ("prefill", "decode") if self.config.chosen_topology.is_separate else ("decode",)
        counts = [getattr(self.config, kind).count for kind in kinds]
        return min((count for count in counts if not isinstance(count, DefaultSize)), default=None)

    @property
    def plan(self) -> ClusterPlan:
        placement = DeploymentPlacement(self.config, self.deployment_id)
        return ClusterPlan(self.config, self.served, placement, (), {})

    def part_of_node(self, capacity: NodeCapacity, num_nodes: int) -> NodeShare:
        placement = DeploymentPlacement(_of_one_node(self.config, num_nodes), self.deployment_id)
        (share,) = placement.place([capacity])
        return share

    def beside_caches(self, num_workers: int) -> int:
        return num_workers * worker_bytes(self.config, self.served)


def plan_models(models: Sequence[PlannedModel], nodes: Sequence[NodeResources]) -> dict[str, ClusterPlan]:
    """Return the plan of each model, by deployment id. Raises NotEnoughMemory naming the model or the node. One model
    alone is on every node, and refused where it does not fit one. Several share nodes, or spread."""
    if len(models) == 1 and len(models[0].nodes) == len(nodes):
        (model,) = models
        return {model.deployment_id: plan_cluster(model.config, model.served, nodes)}
    by_id = {model.deployment_id: model for model in models}
    by_name = {node.capacity.name: node for node in nodes}

    assignable = [AssignableModel(one.deployment_id, one.served.weight_bytes, one.num_workers) for one in models]
    strengths = [AssignableNode(node.capacity.name, node.capacity.weight) for node in nodes]
    for context_len in (ENOUGH_CONTEXT_LEN, LEAST_CONTEXT_LEN):

        def fits(name: str, together: tuple[str, ...], least: int = context_len) -> bool:
            candidates = [by_id[model_id] for model_id in sorted(together, key=list(by_id).index)]
            return _problem(candidates, by_name[name], len(nodes), least) is None

        assigned = assign_models(assignable, strengths, fits)
        if all(assigned.values()):
            return _plans(models, nodes, assigned)
    if len(nodes) == 1:
        raise NotEnoughMemory(_problem(models, nodes[0], 1, LEAST_CONTEXT_LEN))
    raise NotEnoughMemory(_nowhere(next(model for model in models if not assigned[model.deployment_id]), nodes))


def _plans(
    models: Sequence[PlannedModel], nodes: Sequence[NodeResources], assigned: Mapping[str, tuple[str, ...]]
) -> dict[str, ClusterPlan]:
    by_node = {
        node.capacity.name: [model for model in models if node.capacity.name in assigned[model.deployment_id]]
        for node in nodes
    }
    devices = {node.capacity.name: devices_of(by_node[node.capacity.name], node) for node in nodes}
    taken, placed = Counter[str](), {}
    for model in models:
        plan, nodes_of_model = model.plan, assigned[model.deployment_id]
        capacities = [
            replace(node.capacity, gpus=devices[node.capacity.name].get(model.deployment_id, ())) for node in nodes
        ]
        shares = plan.placement.place(capacities, {name: taken[name] for name in nodes_of_model})
        placed[model.deployment_id] = plan, shares, capacities
        taken.update({share.node: share.num_workers for share in shares})
    machines = {}
    for index, node in enumerate(nodes):
        there = by_node[node.capacity.name]
        shares = [placed[model.deployment_id][1][index] for model in there]
        machines[node.capacity.name] = divided(there, shares, node)
    return {
        key: sized_plan(
            plan,
            shares,
            [
                NodeResources(capacity, machines[capacity.name].get(key, node.machine))
                for capacity, node in zip(capacities, nodes, strict=True)
            ],
        )
        for key, (plan, shares, capacities) in placed.items()
    }


def divided(models: Sequence[PlannedModel], shares: Sequence[NodeShare], node: NodeResources) -> dict[str, Machine]:
    taken = [model.beside_caches(share.num_workers) for model, share in zip(models, shares, strict=True)]
    parts = divide(node.machine, node.capacity.gpus, taken) if models else []
    return {model.deployment_id: part.machine for model, part in zip(models, parts, strict=True)}


def models_for_node(
    models: Sequence[PlannedModel], node: NodeResources, beside: Sequence[PlannedModel] = ()
) -> list[PlannedModel]:
    """Choose the models for a joining node, in order, while they fit together. `beside`: models it has already."""
    chosen: list[PlannedModel] = []
    for model in models:
        if _problem([*beside, *chosen, model], node, 1, sys.maxsize) is None:
            chosen.append(model)
    return chosen


def devices_of(models: Sequence[PlannedModel], node: NodeResources) -> dict[str, tuple[str, ...]]:
    devices = assigned_gpus(node.capacity.gpus, len(models))
    return {model.deployment_id: gpus for model, gpus in zip(models, devices, strict=True)}


def planned_again(deployment_id: str, plan: ClusterPlan, nodes: Collection[str]) -> PlannedModel:
    return PlannedModel(deployment_id, plan.config, plan.served, frozenset(nodes))


def _problem(models: Sequence[PlannedModel], node: NodeResources, num_nodes: int, context_len: int) -> str | None:
    if any(node.capacity.name not in model.nodes for model in models):
        return "it has no copy of the model at the same path"
    gpus = assigned_gpus(node.capacity.gpus, len(models))
    capacities = [replace(node.capacity, gpus=devices) for devices in gpus]
    shares = [model.part_of_node(capacity, num_nodes) for model, capacity in zip(models, capacities, strict=True)]
    taken = [model.beside_caches(share.num_workers) for model, share in zip(models, shares, strict=True)]
    try:
        for model, share, part in zip(models, shares, divide(node.machine, node.capacity.gpus, taken), strict=True):
            _require_fits(model, share, part, context_len)
    except NotEnoughMemory as error:
        return str(error)
    return None


def _require_fits(model: PlannedModel, share: NodeShare, part: MachinePart, context_len: int) -> None:
    choice = choose_share(model.plan, share, part.machine)
    if choice.served.max_context_len < min(context_len, model.served.max_context_len):
        max_context_len = choice.served.max_context_len
        raise NotEnoughMemory(f"there is room for contexts of {max_context_len} tokens of {model.served.name}")
    require_room(model.served.name, holding_of(choice.config, model.served, part.gpus), part)


def _nowhere(model: PlannedModel, nodes: Sequence[NodeResources]) -> str:
    problems = [f"{node.capacity.name}: {_problem([model], node, len(nodes), LEAST_CONTEXT_LEN)}" for node in nodes]
    return f"no node has room for {model.served.name} beside the other models; alone {'; '.join(problems)}"


def _of_one_node(config: ClusterConfig, num_nodes: int) -> ClusterConfig:
    changed = {}
    for kind in ("prefill", "decode"):
        section = getattr(config, kind)
        if not isinstance(section.count, DefaultSize):
            changed[kind] = msgspec.structs.replace(section, count=math.ceil(section.count / num_nodes))
    return msgspec.structs.replace(config, **changed)


def plan_one_more(
    model: PlannedModel,
    nodes: Sequence[NodeResources],
    holdings: Mapping[str, Sequence[HeldMemory]],
    taken: Mapping[str, int],
    wholes: Mapping[str, Machine],
) -> ClusterPlan:
    """Return the plan of one more model, on the nodes that have room for it beside others. `nodes`: as found now, with
    all their GPUs; `wholes`: before the first model. `holdings`, `taken`: what the others have there, and how many
    workers. Raises NotEnoughMemory naming what is missing where."""
    left = {
        node.capacity.name: left_of(
            wholes[node.capacity.name], node.machine, node.capacity.gpus, holdings.get(node.capacity.name, ())
        )
        for node in nodes
    }
    for context_len in (ENOUGH_CONTEXT_LEN, LEAST_CONTEXT_LEN):
        problems = {
            node.capacity.name: _problem_beside(model, node, left[node.capacity.name], len(nodes), context_len)
            for node in nodes
        }
        parts = {name: left[name] for name, problem in problems.items() if problem is None}
        if parts:
            break
    else:
        if len(nodes) == 1:
            raise NotEnoughMemory(*problems.values())
        raise NotEnoughMemory("; ".join(f"{name}: {problem}" for name, problem in problems.items()))
    capacities = [
        replace(node.capacity, gpus=parts[node.capacity.name].gpus if node.capacity.name in parts else ())
        for node in nodes
    ]
    plan = model.plan
    shares = plan.placement.place(capacities, {name: taken.get(name, 0) for name in parts})
    machines = [parts[node.capacity.name].machine if node.capacity.name in parts else node.machine for node in nodes]
    sized = sized_plan(
        plan, shares, [NodeResources(capacity, machine) for capacity, machine in zip(capacities, machines, strict=True)]
    )
    for name, choice in sized.choices.items():
        require_room(model.served.name, holding_of(choice.config, choice.served, parts[name].gpus), parts[name])
    return sized


def _problem_beside(
    model: PlannedModel, node: NodeResources, part: MachinePart, num_nodes: int, context_len: int
) -> str | None:
    if node.capacity.name not in model.nodes:
        return "it has no copy of the model at the same path"
    share = model.part_of_node(replace(node.capacity, gpus=part.gpus), num_nodes)
    try:
        _require_fits(model, share, part, context_len)
    except NotEnoughMemory as error:
        return str(error)
    return None

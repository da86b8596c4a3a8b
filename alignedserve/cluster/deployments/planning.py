"""Plans the deployments of a cluster: which nodes work for which model, and with which sizes. Pure.

Models that share a node divide its memory, GPUs and cores.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from alignedserve.cluster.memory_planner import ENOUGH_CONTEXT_LEN, LEAST_CONTEXT_LEN, Machine, worker_grammar_bytes
from alignedserve.cluster.nodes.plan import ClusterPlan, NodeResources, choose_share, plan_cluster, sized_plan
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, NodeShare
from alignedserve.config.sections import MIB, ClusterConfig
from alignedserve.config.unset_sizes import DefaultSize
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel

_PROCESSES_BYTES = 900 * 1024 * 1024  # of a deployment, beside weights and caches: libraries, intermediate results


@dataclass(frozen=True, slots=True)
class MachinePart:
    """The part of a machine that one deployment may use."""

    machine: Machine  # reduced to this share
    gpus: tuple[str, ...] = ()  # devices of its workers; none: they compute on the CPU


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The bytes that one deployment has reserved, whether their pages have been touched or not."""

    host_bytes: int
    shared_bytes: int  # of it, in the folder of the KV pool
    gpus: tuple[str, ...] = ()
    gpu_bytes: int = 0  # on each of them


def worker_bytes(config: ClusterConfig, served: ServedModel) -> int:
    """Return what one worker on the CPU takes beside its caches: for weights, adapters and grammars."""
    return served.weight_bytes + served.vision_bytes + config.lora.worker_bytes + worker_grammar_bytes(served)


def divide(machine: Machine, gpus: Sequence[str], beside_caches: Sequence[int]) -> list[MachinePart]:
    """Divide a machine among models whose workers take so many bytes beside their caches, all of a model together. Each
    model has that, unless it is on GPUs, and all have equal parts of what is left for caches. GPUs are assigned whole,
    in turn, where there is one for each model, and shared otherwise. Cores are shared: a model that has nothing to
    compute leaves all of them to the others."""
    count = len(beside_caches)
    devices = assigned_gpus(gpus, count)
    on_host = [0] * count if gpus else list(beside_caches)
    left = max(machine.available_bytes - sum(on_host), 0)
    return [
        MachinePart(
            replace(
                machine,
                available_bytes=min(beside + left // count, machine.available_bytes),
                shared_bytes=machine.shared_bytes // count,
                gpu_bytes=_gpu_bytes(machine, gpus, devices, index),
            ),
            devices[index],
        )
        for index, beside in enumerate(on_host)
    ]


def assigned_gpus(gpus: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each model: whole ones in turn, or shared ones if there are fewer GPUs than models."""
    if len(gpus) >= count:
        return [tuple(gpus[index::count]) for index in range(count)]
    return [(gpus[index % len(gpus)],) if gpus else () for index in range(count)]


def _gpu_bytes(
    machine: Machine, gpus: Sequence[str], devices: Sequence[tuple[str, ...]], index: int
) -> tuple[int, ...]:
    by_name = dict(zip(gpus, machine.gpu_bytes, strict=True))
    return tuple(by_name[gpu] // sum(gpu in other for other in devices) for gpu in devices[index])


def left_of(whole: Machine, now: Machine, gpus: Sequence[str], holdings: Sequence[HeldMemory]) -> MachinePart:
    """Return the resources left for one more model. `whole`: the machine before the first model, `now`: its present
    state. The system reports reserved memory as free until pages are touched, so holdings are subtracted from `whole`.
    Of the GPUs those with the fewest models."""
    host = whole.available_bytes - sum(holding.host_bytes for holding in holdings)
    shared = whole.shared_bytes - sum(holding.shared_bytes for holding in holdings)
    numbers = {gpu: sum(gpu in holding.gpus for holding in holdings) for gpu in gpus}
    chosen = tuple(gpu for gpu in gpus if numbers[gpu] == min(numbers.values()))
    total = dict(zip(gpus, whole.gpu_bytes, strict=bool(gpus)))
    held = {gpu: sum(holding.gpu_bytes for holding in holdings if gpu in holding.gpus) for gpu in gpus}
    machine = replace(
        now,
        available_bytes=max(min(host, now.available_bytes), 0),
        shared_bytes=max(min(shared, now.shared_bytes), 0),
        gpu_bytes=tuple(max(total[gpu] - held[gpu], 0) for gpu in chosen),
    )
    return MachinePart(machine, chosen)


def holding_of(config: ClusterConfig, served: ServedModel, gpus: Sequence[str]) -> HeldMemory:
    workers = [(config.decode.kv_cache_bytes, config.decode.count)]
    host = _PROCESSES_BYTES + config.decode.swap_space_bytes * config.decode.count
    if config.chosen_topology.is_separate:
        workers.append((config.prefill.kv_cache_bytes, config.prefill.count))
    lenders = config.prefill.count if config.chosen_topology.is_separate else config.decode.count
    lends = config.chosen_topology.is_separate or config.decode.count > 1
    buffers = config.prefill.candidate_buffer_bytes * lenders if lends else 0
    on_gpus, shared = (buffers, 0) if gpus and lends_device_memory(config.engine) else (0, buffers)
    shared += config.node_pool.memory_bytes if config.node_pool is not None else 0
    host += worker_grammar_bytes(served) * config.num_workers
    beside_cache = (
        served.weight_bytes + served.vision_bytes + config.lora.worker_bytes + (served.unpacking_bytes if gpus else 0)
    )
    computing = sum((beside_cache + cache) * count for cache, count in workers)
    if not gpus:
        return HeldMemory(host + shared + computing, shared)
    return HeldMemory(host + shared, shared, tuple(gpus), -(-(computing + on_gpus) // len(gpus)))


def require_room(name: str, holding: HeldMemory, part: MachinePart) -> None:
    needs = {
        "of memory": (holding.host_bytes, part.machine.available_bytes),
        "in the folder of the KV pool": (holding.shared_bytes, part.machine.shared_bytes),
        "on a GPU": (holding.gpu_bytes, min(part.machine.gpu_bytes, default=0)),
    }
    for where, (needed, left) in needs.items():
        if needed > left:
            raise NotEnoughMemory(
                f"{name} needs {needed // MIB} MiB {where} beside the models that are served, {left // MIB} MiB are "
                "left; remove a model, or set decode.kv_cache_bytes or model.max_context_len lower"
            )


_MAX_TRIES = 2000  # in the search for a way in which every model has a node


@dataclass(frozen=True, slots=True)
class AssignableModel:
    """A model as its assignment sees it."""

    deployment_id: str
    num_bytes: int  # of weights: larger models choose first
    most_nodes: int | None = None  # one for each configured worker; None: workers follow the nodes


@dataclass(frozen=True, slots=True)
class AssignableNode:
    """A node as the assignment sees it."""

    name: str
    weight: int  # its strength among others of its kind


Fits = Callable[[str, tuple[str, ...]], bool]  # whether a node has room for all these models at once
Assignment = Mapping[str, tuple[str, ...]]  # the nodes of each model, in the nodes' order


def assign_models(models: Sequence[AssignableModel], nodes: Sequence[AssignableNode], fits: Fits) -> Assignment:
    """Return the nodes of each model, by deployment id; a model that fits nowhere has none. `fits` must be true of
    fewer models where it is true of more."""
    assigning = _Assigning(models, nodes, fits)
    assigning.place_each()
    assigning.fill()
    return assigning.found()


class _Assigning:
    def __init__(self, models: Sequence[AssignableModel], nodes: Sequence[AssignableNode], fits: Fits) -> None:
        self._models = models
        self._nodes = nodes
        self._fits = fits
        self._placed: dict[str, list[str]] = {node.name: [] for node in nodes}  # models by node
        self._num_tries = 0

    def place_each(self) -> None:
        ordered = sorted(self._models, key=lambda model: -model.num_bytes)
        if not self._place_from(ordered):
            for model in ordered:
                self._place(model.deployment_id)

    def _place_from(self, models: Sequence[AssignableModel]) -> bool:
        if not models:
            return True
        wanted = models[0].deployment_id
        for node in self._preferred():
            if self._num_tries > _MAX_TRIES:
                return False
            self._num_tries += 1
            of_node = self._placed[node.name]
            if self._fits(node.name, (*of_node, wanted)):
                of_node.append(wanted)
                if self._place_from(models[1:]):
                    return True
                of_node.remove(wanted)
        return False

    def fill(self) -> None:
        left = {model.deployment_id: model.most_nodes or len(self._nodes) for model in self._models}
        counts = {wanted: sum(wanted in models for models in self._placed.values()) for wanted in left}
        while left:
            wanted = min(left, key=lambda model_id: counts[model_id])
            if counts[wanted] < left[wanted] and self._place(wanted):
                counts[wanted] += 1
            else:
                del left[wanted]  # nodes only become fuller

    def _place(self, wanted: str) -> bool:
        for node in self._preferred():
            of_node = self._placed[node.name]
            if wanted not in of_node and self._fits(node.name, (*of_node, wanted)):
                of_node.append(wanted)
                return True
        return False

    def _preferred(self) -> list[AssignableNode]:
        return sorted(self._nodes, key=lambda node: (len(self._placed[node.name]), -node.weight))

    def found(self) -> Assignment:
        return {
            model.deployment_id: tuple(
                node.name for node in self._nodes if model.deployment_id in self._placed[node.name]
            )
            for model in self._models
        }


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

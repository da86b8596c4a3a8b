"""Divides one machine among the models of a cluster: memory, GPUs and cores. Pure arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from alignedserve.cluster.memory_planner import Machine, worker_grammar_bytes
from alignedserve.config.sections import MIB, ClusterConfig
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

"""Divides one machine among the models of a cluster: memory, GPUs and cores. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignedserve.cluster.memory_planner import Machine, worker_grammar_bytes
from alignedserve.config.sections import MIB, ClusterConfig
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel

_PROCESSES_BYTES = 900 * 1024 * 1024  # of a deployment, beside weights and caches: libraries, intermediate results


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a machine that one deployment may use."""

    machine: Machine  # as if there were no more
    gpus: tuple[str, ...] = ()  # devices of its workers; none: they compute on the CPU


@dataclass(frozen=True, slots=True)
class Holding:
    """The bytes that one deployment has reserved, whether their pages have been touched or not."""

    host_bytes: int
    shared_bytes: int  # of it, in the folder of the KV pool
    gpus: tuple[str, ...] = ()
    gpu_bytes: int = 0  # on each of them


def worker_bytes(config: ClusterConfig, served: ServedModel) -> int:
    """Return what one worker on the CPU takes beside its caches: for weights, adapters and grammars."""
    return served.weight_bytes + served.vision_bytes + config.lora.worker_bytes + worker_grammar_bytes(served)


def divide(machine: Machine, gpus: Sequence[str], beside_caches: Sequence[int]) -> list[Part]:
    """Divide a machine among models whose workers take so many bytes beside their caches, all of a model together.

    Each model has that, unless it is on GPUs, and all have equal parts of what is left for caches. GPUs are assigned
    whole, in turn, where there is one for each model, and shared otherwise. Cores are shared: a model that has nothing
    to compute leaves all of them to the others.
    """
    count = len(beside_caches)
    devices = assigned_gpus(gpus, count)
    on_host = [0] * count if gpus else list(beside_caches)
    left = max(machine.available_bytes - sum(on_host), 0)
    return [
        Part(
            replace(
                machine,
                available_bytes=min(own + left // count, machine.available_bytes),
                shared_bytes=machine.shared_bytes // count,
                gpu_bytes=_gpu_bytes(machine, gpus, devices, index),
            ),
            devices[index],
        )
        for index, own in enumerate(on_host)
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


def left_of(whole: Machine, now: Machine, gpus: Sequence[str], holdings: Sequence[Holding]) -> Part:
    """Return what is left for one more model beside these.

    `whole`: the machine before the first of them, `now`: as it is found. Memory that is held but was not touched yet
    is free by what the system says, so it is taken off what there was. Of the GPUs those with the fewest models.
    """
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
    return Part(machine, chosen)


def holding_of(config: ClusterConfig, served: ServedModel, gpus: Sequence[str]) -> Holding:
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
        return Holding(host + shared + computing, shared)
    return Holding(host + shared, shared, tuple(gpus), -(-(computing + on_gpus) // len(gpus)))


def require_room(name: str, holding: Holding, part: Part) -> None:
    needs = {
        "of memory": (holding.host_bytes, part.machine.available_bytes),
        "in the folder of the KV pool": (holding.shared_bytes, part.machine.shared_bytes),
        "on a GPU": (holding.gpu_bytes, min(part.machine.gpu_bytes, default=0)),
    }
    for place, (needed, left) in needs.items():
        if needed > left:
            raise NotEnoughMemory(
                f"{name} needs {needed // MIB} MiB {place} beside the models that are served, {left // MIB} MiB are "
                "left; remove a model, or set decode.kv_cache_bytes or model.max_context_len lower"
            )

"""Configures simulations: hardware and its memory for caches, topology, settings and mechanisms of a policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from alignedserve.config.sections import ClusterConfig, SchedulingConfig, Topology
from alignedserve.core.block_layout import LARGEST_BLOCK, BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel, hardware, nvlink_link, pcie_link
from alignedserve.costmodel.model_shapes import ModelShape, num_cache_blocks, rings_pay
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.policies import (
    policy_entry,
    require_policy,
    wanted_mechanisms,
    wants_shared_blocks,
)
from alignedserve.scheduling.policy import Mechanism
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.profile_file import MachineProfile
from lab.sim.config import SimConfig, SimLinks, SimMechanisms
from lab.workload.requests import RequestSource, TimedRequest, Workload, in_every_turn

_NETWORK = LinkModel(20e-6, 12.5e9)  # 100 Gbit/s


@dataclass(frozen=True, slots=True)
class ClusterHardware:
    """Hardware of the workers. Both kinds serve one model."""

    decode: WorkerSpec  # colocated workers too
    prefill: WorkerSpec | None = None  # None: as `decode`
    source: str = "roofline"  # of the cost model, as in costmodel.choice
    buffer_share: float = 0.5  # of a prefill worker's memory for caches, for the decode workers' candidate buffers
    network: LinkModel = _NETWORK  # between two hosts


def simulated_on(cluster_hardware: ClusterHardware, cluster: ClusterConfig) -> SimConfig:
    """Configure this cluster on this hardware: workers' `kv_cache_bytes` become what the model leaves free.

    Each accelerator of a worker has links of its own. Raises ConfigError for unknown names, for a model that does not
    fit, and where prefill and decode workers differ in their model.
    """
    decode, prefill = cluster_hardware.decode, cluster_hardware.prefill or cluster_hardware.decode
    if decode.shape != prefill.shape:
        raise ConfigError(f"prefill workers serve {prefill.shape.name!r}, decode workers {decode.shape.name!r}")
    layout = _layout(decode.shape, cluster, is_cpu=False)
    on_prefill = _cache_bytes(prefill, layout)
    replace = msgspec.structs.replace
    buffer_bytes = int(on_prefill * cluster_hardware.buffer_share)
    sections = {
        "decode": replace(cluster.decode, kv_cache_bytes=_cache_bytes(decode, layout)),
        "prefill": replace(
            cluster.prefill, kv_cache_bytes=on_prefill - buffer_bytes, candidate_buffer_bytes=buffer_bytes
        ),
    }
    return SimConfig(
        cluster=replace(cluster, **sections),
        layout=layout,
        links=_links(decode, cluster_hardware.network),
        decode_costs=make_cost_model(cluster_hardware.source, decode),
        prefill_costs=make_cost_model(cluster_hardware.source, prefill),
        context_len=_context_len(decode.shape, cluster),
    )


def simulated_as_profiled(profile: MachineProfile, cluster: ClusterConfig) -> SimConfig:
    """Configure this cluster on a profiled machine (`alignedserve profile`), with all caches in host memory.

    Workers have the `kv_cache_bytes` of the configuration. Each is as fast as the profiled worker.
    """
    costs, link = profile.cost_model(), profile.memory_link
    context_len = _context_len(profile.shape, cluster)
    links, is_cpu = SimLinks(link, link), profile.num_threads is not None
    layout = _layout(profile.shape, cluster, is_cpu=is_cpu)
    return SimConfig(cluster, layout, links, costs, context_len=context_len, can_stop=is_cpu)


def _context_len(shape: ModelShape, cluster: ClusterConfig) -> int | None:
    return cluster.model.max_context_len or shape.num_positions or None


def _layout(shape: ModelShape, cluster: ClusterConfig, *, is_cpu: bool) -> BlockLayout:
    if cluster.engine.kv_cache_dtype != "auto":
        raise ConfigError("engine.kv_cache_dtype: simulated caches have the model's dtype; leave it at auto")
    sizes = (shape.num_cached_layers or shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype)
    state_bytes, size = shape.num_state_layers * shape.state_layer_bytes, int(cluster.engine.block_size)
    layout = BlockLayout(size, *sizes, num_parts=shape.kv_parts, state_bytes=state_bytes, unlike=shape.unlike)
    while layout.state_bytes > layout.kv_bytes and size < LARGEST_BLOCK:  # as live, or larger
        size *= 2
        layout = BlockLayout(size, *sizes, num_parts=shape.kv_parts, state_bytes=state_bytes)
        layout = layout.with_own_states(shape.num_state_layers, shape.state_layer_bytes)
    return _with_rings(layout, shape, cluster, is_cpu=is_cpu) if shape.num_windowed_layers else layout


def _with_rings(layout: BlockLayout, shape: ModelShape, cluster: ClusterConfig, *, is_cpu: bool) -> BlockLayout:
    rings, choice = layout.with_rings(shape.num_windowed_layers, shape.window), cluster.engine.window_cache
    longest = _context_len(shape, cluster)
    is_chosen = choice == "auto" and is_cpu and longest is not None and rings_pay(layout, rings, longest)
    return rings if choice == "ring" or is_chosen else layout


def _cache_bytes(worker: WorkerSpec, layout: BlockLayout) -> int:
    machine, degree = hardware(worker.hardware), worker.tensor_parallel * worker.pipeline_parallel
    num_blocks = num_cache_blocks(worker.shape, machine, tensor_parallel=degree, block_size=layout.block_size)
    return num_blocks * layout.block_bytes * (layout.num_layers + layout.ring_layers) // layout.num_layers


def _links(worker: WorkerSpec, network: LinkModel) -> SimLinks:
    machine = hardware(worker.hardware)
    pcie, nvlink = pcie_link(machine), nvlink_link(machine)
    host, device = (_widened(link, worker.tensor_parallel) for link in (pcie, nvlink))
    return SimLinks(host, device, network=network)


def _widened(link: LinkModel, degree: int) -> LinkModel:
    return LinkModel(link.latency_s, link.bytes_per_s * degree)


def with_policy(
    cluster: ClusterConfig, name: str, settings: Mapping[str, Any] | None = None, *, topology: Topology | None = None
) -> ClusterConfig:
    """Configure this cluster for a policy, in the policy's topology unless another is given.

    Settings that the policy implies become its own unless the cluster sets them. Raises ConfigError for
    an unknown name, parameter or value, and where the policy does not run in that topology.
    """
    scheduling = msgspec.structs.replace(cluster.scheduling, policy=name, policy_params=dict(settings or {}))
    chosen = topology or policy_entry(name).topologies[0]
    require_policy(scheduling, chosen, frozenset(Mechanism))  # the simulated engine can have all of them
    return resolve_policy(msgspec.structs.replace(cluster, topology=chosen, scheduling=scheduling))


def simulated_policy(cluster_hardware: ClusterHardware | MachineProfile, cluster: ClusterConfig) -> SimConfig:
    """Configure this cluster on this hardware, with all mechanisms that its policy wants, at their true costs.

    Raises ConfigError for unknown names, for a model that does not fit, and for a policy that needs what this model
    cannot have (a hidden cache where it is larger than keys and values).
    """
    if isinstance(cluster_hardware, MachineProfile):
        shape, config = cluster_hardware.shape, simulated_as_profiled(cluster_hardware, cluster)
    else:
        shape, config = cluster_hardware.decode.shape, simulated_on(cluster_hardware, cluster)
    scheduling, changed = cluster.scheduling, msgspec.structs.replace
    wanted = wanted_mechanisms(scheduling)
    decode = changed(
        config.cluster.decode,
        swap_space_bytes=cluster.decode.swap_space_bytes if Mechanism.SWAP in wanted else 0,
        swap_format="int8" if Mechanism.INT8_SWAP in wanted else cluster.decode.swap_format,
    )
    mechanisms = mechanisms_for(
        scheduling,
        hidden_ratio=shape.hidden_ratio,
        can_move=cluster.chosen_topology is not Topology.COLOCATED,
        has_int8_swaps=decode.has_int8_swaps,
    )
    config = replace(config, cluster=changed(config.cluster, decode=decode), mechanisms=mechanisms)
    require_policy(scheduling, cluster.chosen_topology, config.available | {Mechanism.KNOWN_LENGTHS})
    return config


def mechanisms_for(
    scheduling: SchedulingConfig, *, hidden_ratio: float, can_move: bool = False, has_int8_swaps: bool = False
) -> SimMechanisms:
    """Return the mechanisms for this policy. `hidden_ratio`: the model's; from 1 on there is no hidden cache."""
    wanted = wanted_mechanisms(scheduling)
    has_hidden = Mechanism.HIDDEN_CACHE in wanted and hidden_ratio < 1.0
    return SimMechanisms(
        hidden_ratio=hidden_ratio if has_hidden else None,
        has_shared_blocks=wants_shared_blocks(scheduling, can_move=can_move, has_int8_swaps=has_int8_swaps),
    )


# --- policies that know how long answers will be


def as_predicted_for(scheduling: SchedulingConfig, workload: Workload) -> Workload:
    """Return the workload with exact predictions if the policy must know lengths."""
    if Mechanism.KNOWN_LENGTHS not in wanted_mechanisms(scheduling):
        return workload
    loops = tuple(replace(loop, stream=_KnownStream(loop.stream)) for loop in workload.closed_loops)
    requests = tuple(in_every_turn(request, _known) for request in workload.requests)
    return replace(workload, requests=requests, closed_loops=loops)


@dataclass(frozen=True, slots=True)
class _KnownStream:
    stream: RequestSource

    def __getitem__(self, number: int) -> TimedRequest:
        return in_every_turn(self.stream[number], _known)


def _known(request: TimedRequest) -> TimedRequest:
    return replace(request, predicted_len=request.output_len)

"""The hardware of a simulated cluster: a model on named accelerators, and the memory left for caches."""

from dataclasses import dataclass

import msgspec

from alignedserve.config.sections import ClusterConfig
from alignedserve.core.block_layout import LARGEST_BLOCK, BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.links import LinkModel, nvlink_link, pcie_link
from alignedserve.costmodel.memory import num_cache_blocks, rings_pay
from alignedserve.costmodel.model_shapes import ModelShape
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.profile_file import MachineProfile
from lab.sim.config import SimConfig, SimLinks

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

    Workers have the `kv_cache_bytes` of the configuration. They share no cores: each is as fast as the one profiled.
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

"""Chooses the sizes that a configuration leaves unset, from what the machine has and the model needs.

Memories get what a full batch of ordinary requests needs, or what there is; where one request of the longest context
does not fit, the context is shortened. What is set is never changed: whether it can work is for `preflight` to say.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from alignedserve.cluster.memory_planner import (
    LEAST_CONTEXT_LEN,
    SIZED,
    Kept,
    Machine,
    MemoryPlanner,
    is_any_set,
    worker_grammar_bytes,
)
from alignedserve.config.sections import MIB, ClusterConfig, PrefixCacheConfig
from alignedserve.config.unset_sizes import DefaultSize, with_fixed_sizes
from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.costmodel.gpu_limits import LEAST_TOKENS
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.policies import policy_entry

_GIB = 1024 * MIB
_CHUNK_S = 1.0  # a chunk takes about this long at most, so that others' tokens need not wait longer
_CHUNKS = (64, 512)  # shorter ones read the weights too often, longer ones gain nothing
# On a GPU, where one has this memory: chunks of an 8B model then take a quarter of a second on an H100.
_GPU_CHUNK, _LARGE_GPU_CHUNK, _LARGE_GPU_BYTES = 4096, 8192, 60 * _GIB
_FLOPS_PER_CORE = {True: 200e9, False: 100e9}  # of packed products, by whether they are in native bfloat16


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """A configuration without unset sizes, and the model with the context that fits it."""

    config: ClusterConfig
    served: ServedModel
    warnings: tuple[str, ...] = ()

    def remarks(self, *, names_model: bool = False) -> tuple[str, ...]:
        return tuple(f"{self.served.name}: {warning}" for warning in self.warnings) if names_model else self.warnings

    def line(self, *, names_model: bool = False) -> str:
        """Return the choice in one line, with what would change it. `names_model`: for where several are served."""
        config, served = self.config, self.served
        cache = config.decode.kv_cache_bytes
        tokens = cache // served.block_layout(config.engine.block_size).token_bytes
        parts = [served.dtype if served.quantization is None else f"{served.quantization} and {served.dtype}"]
        is_separate = config.chosen_topology.is_separate
        worker = "decode worker" if is_separate else "worker"
        parts += [f"context {served.max_context_len}", f"{_spelt(cache)} of cache per {worker} ({tokens} tokens)"]
        layout = served.block_layout(config.engine.block_size)
        if layout.state_bytes:
            state = _spelt(layout.block_bytes - layout.kv_bytes)
            parts.append(f"{state} of states in each block of {layout.block_size} tokens")
        if layout.state_blocks:
            contents = "windows" if layout.ring_layers else "states"
            parts.append(f"{_spelt(layout.context_bytes)} of it for the {contents} of each request, however long")
        if config.prefix_cache.pool_bytes:
            parts.append(f"{_spelt(config.prefix_cache.pool_bytes)} for prefixes that workers share")
        chunk = config.decode.max_num_batched_tokens
        settings = "decode.kv_cache_bytes=..., "
        if is_separate:
            parts.append(f"pool {_spelt(config.pool.memory_bytes)}")
            chunk, settings = config.prefill.max_num_batched_tokens, settings + "pool.memory_bytes=..., "
        if config.engine.device.startswith(CUDA):
            parts.append(f"up to {config.decode.max_running_requests} requests at a time per {worker}")
            settings += "decode.max_running_requests=..., "
        parts.append(f"prompts in chunks of {chunk}")
        if worker_grammar_bytes(served):
            parts.append(f"up to {_spelt(worker_grammar_bytes(served))} per worker for grammars")
        head = f"Sizes of {served.name}" if names_model else "Sizes"
        return f"{head}: {', '.join(parts)}; change with --set {settings}model.max_context_len=... or model.dtype=..."


def with_block_size(config: ClusterConfig, served: ServedModel) -> ClusterConfig:
    """Return the configuration with a size of blocks: the model's own, if none is set."""
    engine = config.engine
    size = served.default_block_size if isinstance(engine.block_size, DefaultSize) else engine.block_size
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(engine, block_size=size))


def choose_sizes(
    config: ClusterConfig, served: ServedModel, machine: Machine, *, recomputing_bytes: int = 0
) -> SizeChoice:
    """Choose what is unset. `recomputing_bytes`: beside each decode block, where the policy keeps hidden caches.
    `config`: with its topology and counts. Raises NotEnoughMemory naming what to change, where all sizes are unset and
    the least ones do not fit."""
    if served.encoder is not None:  # whose prompts leave nothing to share
        config = msgspec.structs.replace(config, prefix_cache=PrefixCacheConfig(enabled=False))
    planner = MemoryPlanner(config, served, machine, recomputing_bytes)
    longest = planner.longest_context()
    if longest is None and not is_any_set(config):
        raise NotEnoughMemory(_refusal(planner))
    context_len = longest or served.max_context_len
    warnings = [_shortened_remark(planner, context_len)] if context_len < served.max_context_len else []
    if served.stored is not None and served.stored.warning is not None:
        warnings.append(f"Weights: {served.stored.warning}.")
    sized = _with_limits(config, _with_sizes(config, planner.sizes_at(context_len)), planner)
    return SizeChoice(with_fixed_sizes(sized), replace(served, max_context_len=context_len), tuple(warnings))


def _with_sizes(config: ClusterConfig, sizes: Mapping[tuple[str, str], int]) -> ClusterConfig:
    changed = msgspec.structs.replace
    sections = {
        name: changed(
            getattr(config, name), **{field: size for (section, field), size in sizes.items() if section == name}
        )
        for name in SIZED
    }
    return changed(config, **sections)


def _with_limits(config: ClusterConfig, sized: ClusterConfig, planner: MemoryPlanner) -> ClusterConfig:
    """Choose the unset limits of iterations: fewer requests where caches are small, shorter chunks of large models. On
    GPUs as many requests as the decode worker's cache has room for."""
    changed, served, machine = msgspec.structs.replace, planner.served, planner.machine
    threads = sized.engine.threads_per_worker or max(machine.num_cores // (sized.num_workers - sized.decode.standby), 1)
    chunk = _chunk(served, threads, machine.has_bfloat16)
    if machine.gpu_bytes:
        chunk = _LARGE_GPU_CHUNK if min(machine.gpu_bytes) >= _LARGE_GPU_BYTES else _GPU_CHUNK
    layout = served.block_layout(sized.engine.block_size)
    sections = {}
    for name in ("prefill", "decode"):
        before, section = getattr(config, name), getattr(sized, name)
        limits: dict[str, int] = {}
        if name == "decode" and machine.gpu_bytes and served.encoder is None:
            limits["max_running_requests"] = planner.running_requests(section.kv_cache_bytes)
        elif isinstance(before.max_running_requests, DefaultSize) and isinstance(before.kv_cache_bytes, DefaultSize):
            room = section.kv_cache_bytes // (layout.token_bytes * LEAST_TOKENS + layout.context_bytes)
            limits["max_running_requests"] = min(max(room, 1), before.max_running_requests)
        if isinstance(before.max_num_batched_tokens, DefaultSize):
            limits["max_num_batched_tokens"] = chunk
        sections[name] = changed(section, **limits)
    return changed(sized, **sections)


def _chunk(served: ServedModel, num_threads: int, has_bfloat16: bool) -> int:
    is_native = has_bfloat16 and served.dtype == "bfloat16"
    tokens = num_threads * _FLOPS_PER_CORE[is_native] * _CHUNK_S / (2 * served.config.num_projected)
    shortest, longest = _CHUNKS
    return min(max(1 << int(math.log2(max(tokens, 1.0))), shortest), longest)


def _shortened_remark(planner: MemoryPlanner, context_len: int) -> str:
    full = planner.served.max_context_len
    layout = planner.served.block_layout(planner.config.engine.block_size)
    cache = layout.token_bytes * full + layout.context_bytes
    needed = planner.needed_bytes(full, Kept.USUALLY)
    possible = planner.longest_that_fits() or 0
    settable = f"; model.max_context_len={possible} is the most that can be set" if possible > context_len else ""
    return (
        f"the context is shortened from {full} to {context_len} tokens: {full} need {_spelt(cache)} of cache in each "
        f"memory, {_spelt(needed)} available in all, and {_spelt(planner.machine.available_bytes)} are{settable}"
    )


def _refusal(planner: MemoryPlanner) -> str:
    served, machine = planner.served, planner.machine
    context_len = min(served.max_context_len, LEAST_CONTEXT_LEN)
    if planner.config.model.max_context_len is not None:
        context_len = served.max_context_len
    needed = planner.needed_bytes(context_len, Kept.AT_LEAST)
    remedies = (text for text, other in _remedies(planner) if other.longest_context() is not None)
    weights = f"{_spelt(served.weight_bytes)} of weights in {served.dtype}"
    return (
        f"{served.name} needs {_spelt(needed)} of memory for a context of {context_len} tokens "
        f"({planner.config.num_workers} x {weights}), {_spelt(machine.available_bytes)} are available"
        f"{f' and {_spelt(machine.shared_bytes)} shared' if planner.topology.is_separate else ''}; "
        f"{next(remedies, 'choose a smaller model')}"
    )


def _remedies(planner: MemoryPlanner) -> Iterator[tuple[str, MemoryPlanner]]:
    config, served, changed = planner.config, planner.served, msgspec.structs.replace
    shorter = planner.longest_that_fits()
    together = policy_entry(config.scheduling.policy).topology_together
    if config.model.max_context_len is not None and shorter is not None:
        yield f"set model.max_context_len={shorter}", planner.with_(served=replace(served, max_context_len=shorter))
    if planner.topology.is_separate and together is not None:
        yield f"set topology={together.value}", planner.with_(config=changed(config, topology=together))
    kinds = ("decode", "prefill") if planner.topology.is_separate else ("decode",)
    if config.num_workers > len(kinds):
        fewer = {name: changed(getattr(config, name), count=1) for name in kinds}
        yield f"set {' and '.join(f'{name}.count=1' for name in kinds)}", planner.with_(config=changed(config, **fewer))
    if served.quantization is None:
        yield "set model.quantization=int8", planner.with_(served=replace(served, quantization="int8", stored=None))
    if DTYPE_BYTES[served.dtype] > DTYPE_BYTES["bfloat16"]:
        halved = replace(served, dtype="bfloat16")
        yield "set model.dtype=bfloat16", planner.with_(served=halved)
        smallest = replace(halved, quantization="int8", stored=None)
        yield "set model.dtype=bfloat16 and model.quantization=int8", planner.with_(served=smallest)


def _spelt(size: int) -> str:
    if size < MIB:
        return f"{-(-size // 1024)} KiB"
    if size < _GIB:
        return f"{size // MIB} MiB"
    return f"{size / _GIB:.{2 if size < 10 * _GIB else 1}f} GiB"

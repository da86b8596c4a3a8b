"""Plans the memories of a cluster on one machine: what has to fit, where it lies, how long a context that allows.

Every memory has a least size, which holds one request of the longest context, and a wanted one, which holds as many
tokens as a full batch of ordinary requests. Where the wanted ones do not fit they shrink together, down to the least.

A quarter of what is available stays free: nothing was asked for, and other programs of the machine, such as a browser
or a compiler, take a few GiB; mostly there is no swap, so that the system ends a process where memory is short. The
page cache needs room as well. Only a context that would be shorter than 16 384 tokens, or that was set, may take more,
up to seven eighths. Where one request of the longest context does not fit, the context is shortened. What is set is
never changed: whether it can work is for `preflight` to say.
"""

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from alignedserve.config.sections import MIB, ClusterConfig, PrefixCacheConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize, with_fixed_sizes
from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ConfigError, NotEnoughMemory
from alignedserve.costmodel.gpu_limits import LEAST_TOKENS, REQUEST_TOKENS, running_requests
from alignedserve.costmodel.hardware import Hardware
from alignedserve.costmodel.roofline import RooflineModel
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.grammar.memory import grammar_bytes
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import Mechanism

LEAST_CONTEXT_LEN = 256  # shorter is of no use
ENOUGH_CONTEXT_LEN = 16384  # no free memory is given up for more than this
_STEP = 1024  # of a shortened context
_SYSTEM_BYTES = 512 * MIB  # gateway, router (a part of it: router.max_learnt_bytes), Ray
_PROCESS_BYTES = 300 * MIB  # a worker's libraries and intermediate results
_OBJECT_STORE_BYTES = 96 * MIB  # Ray's, in the pool's folder
GPU_SHARE = 0.85  # of a GPU's memory, for weights and blocks
SIZED = ("prefill", "decode", "pool", "prefix_cache")  # sections with memories
_MEMORY_FIELDS = ("kv_cache_bytes", "candidate_buffer_bytes", "swap_space_bytes", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """The free resources of one machine."""

    available_bytes: int  # memory
    shared_bytes: int  # of it, in the folder of the KV pool
    num_cores: int
    has_bfloat16: bool  # the processor multiplies it natively
    gpu_bytes: tuple[int, ...] = ()  # of each GPU that workers use; none: they compute on the CPU
    has_float8: bool = False  # the GPUs multiply FP8
    gpu: Hardware | None = None  # the slowest of the GPUs; None: none, or one that nothing is known of


class Kept(enum.IntEnum):
    """Fraction of the memory to keep free, as a divisor."""

    USUALLY = 4
    AT_LEAST = 8


class Place(enum.Enum):
    """A place that memories share."""

    HOST = "memory"
    SHARED = "the folder of the KV pool"
    PREFILL_GPU = "the GPU of a prefill worker"
    DECODE_GPU = "the GPU of a decode worker"


@dataclass(frozen=True, slots=True)
class Memory:
    """One kind of memory of the cluster."""

    section: str
    field: str
    least: int
    wanted: int
    counts: Mapping[Place, int]  # how many of it lie where


class MemoryPlanner:
    """The needs of one configuration on one machine."""

    def __init__(self, config: ClusterConfig, served: ServedModel, machine: Machine, recomputing_bytes: int) -> None:
        self.config, self.served, self.machine = config, served, machine
        self.topology = config.chosen_topology
        self._recomputing_bytes = recomputing_bytes

    def longest_context(self) -> int | None:
        """Return the longest context that is served; None: none that is of use. One that was set is not shortened."""
        longest = self.served.max_context_len
        if self._fits(longest):
            return longest
        if self.config.model.max_context_len is not None or is_any_set(self.config):
            return longest if self._fits(longest, Kept.AT_LEAST) else None
        usual = self.longest_that_fits(Kept.USUALLY)
        if usual is not None and usual >= ENOUGH_CONTEXT_LEN:
            return usual
        tight = self.longest_that_fits()
        return None if tight is None else min(tight, ENOUGH_CONTEXT_LEN)

    def longest_that_fits(self, margin: Kept = Kept.AT_LEAST) -> int | None:
        """Return the longest context that fits, in whole steps where it is long; None: none that is of use."""
        low, high = min(LEAST_CONTEXT_LEN, self.served.max_context_len), self.served.max_context_len
        if not self._fits(low, margin):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, margin) else (low, middle - 1)
        return low // _STEP * _STEP if self.served.max_context_len > low > _STEP else low

    def with_(self, *, config: ClusterConfig | None = None, served: ServedModel | None = None) -> "MemoryPlanner":
        return MemoryPlanner(config or self.config, served or self.served, self.machine, self._recomputing_bytes)

    def needed_bytes(self, context_len: int, margin: Kept) -> int:
        needed = sum(memory.least * memory.counts.get(Place.HOST, 0) for memory in self._memories(context_len))
        needed += self._host_weights()
        return max(-(-needed * margin // (margin - 1)) + margin, needed + self._overhead())

    def sizes_at(self, context_len: int) -> dict[tuple[str, str], int]:
        """Return every memory's size by section and field: wanted where all fit, less where they do not."""
        memories, limits = self._memories(context_len), self._limits(Kept.USUALLY)
        shares = {location: _share(memories, location, limit) for location, limit in limits.items()}
        sizes: dict[tuple[str, str], int] = {}
        for memory in memories:
            share = min(shares[count] for count in memory.counts)
            size = memory.least + int((memory.wanted - memory.least) * share)
            sizes[memory.section, memory.field] = max(size // MIB * MIB, memory.least)
        return sizes

    def _fits(self, context_len: int, margin: Kept = Kept.USUALLY) -> bool:
        memories = self._memories(context_len)
        return all(
            sum(memory.least * memory.counts.get(location, 0) for memory in memories) <= limit
            for location, limit in self._limits(margin).items()
        )

    def _host_weights(self) -> int:
        return 0 if self.machine.gpu_bytes else self.config.num_workers * self._worker_weights()

    def _worker_weights(self) -> int:
        return self.served.weight_bytes + self.served.vision_bytes + self.config.lora.worker_bytes

    def _overhead(self) -> int:
        config = self.served.config
        largest = config.vocab_size * config.embedding_size * DTYPE_BYTES[self.served.dtype]
        return _SYSTEM_BYTES + self.config.num_workers * (_PROCESS_BYTES + largest + worker_grammar_bytes(self.served))

    def _limits(self, margin: Kept) -> dict[Place, int]:
        machine = self.machine
        free = max(machine.available_bytes // margin, self._overhead())
        limits = {Place.HOST: machine.available_bytes - free - self._host_weights()}
        if self.topology is not Topology.COLOCATED or self._keeps_prefixes:
            shared = machine.shared_bytes * 9 // 10
            limits[Place.SHARED] = max(shared - _OBJECT_STORE_BYTES, shared // 2)
        if machine.gpu_bytes:
            ranks = self.config.engine.tensor_parallel  # each on a GPU of its own
            sharing = math.ceil(self.config.num_workers / max(len(machine.gpu_bytes) // ranks, 1))
            per_worker = int(min(machine.gpu_bytes) * GPU_SHARE) * ranks // sharing - self._worker_weights()
            per_worker -= self.served.unpacking_bytes
            limits |= {Place.PREFILL_GPU: per_worker, Place.DECODE_GPU: per_worker}
        return limits

    def _memories(self, context_len: int) -> list[Memory]:
        config, is_on_gpu = self.config, bool(self.machine.gpu_bytes)
        block = self.served.block_layout(config.engine.block_size)
        context_bytes = block.token_bytes * (context_len + config.engine.block_size) + block.context_bytes
        hidden = -(-context_bytes // block.block_bytes) * (block.block_bytes + self._recomputing_bytes)
        decode_places = {Place.DECODE_GPU: 1} if is_on_gpu else {Place.HOST: config.decode.count}
        prefill_places = {Place.PREFILL_GPU: 1} if is_on_gpu else {Place.HOST: config.prefill.count}
        wanted = max(self._wanted(config.decode.max_running_requests), hidden, config.decode.kv_cache_bytes)
        on_gpu = max(self._limits(Kept.USUALLY).get(Place.DECODE_GPU, 0), hidden)
        decode = self._memory(
            "decode",
            "kv_cache_bytes",
            hidden if self._recomputing_bytes else context_bytes,
            on_gpu if is_on_gpu else wanted,
            decode_places,
        )
        swap = max(wanted // 2, config.decode.swap_space_bytes)
        swapped = self._memory("decode", "swap_space_bytes", 0, swap, {Place.HOST: config.decode.count})
        prefixes = [self._prefixes(wanted)] if self._keeps_prefixes else []
        if not self.topology.is_separate:
            if self.topology is Topology.COLOCATED or config.decode.count == 1:  # lends no other anything
                return [decode, swapped, *prefixes]
            lent = max(wanted // 4, config.prefill.candidate_buffer_bytes)
            lent_places = self._buffer_places(Place.DECODE_GPU, config.decode.count)
            lending = self._memory("prefill", "candidate_buffer_bytes", 0, lent, lent_places)
            return [decode, swapped, lending, *prefixes]
        batch = self._wanted(config.decode.max_running_requests)
        if is_on_gpu:
            batch = max(batch, min(self._wanted(self.running_requests(on_gpu)), on_gpu))
        pool = max(batch * config.decode.count, context_bytes, config.pool.memory_bytes)
        buffers = max(wanted * config.decode.count // config.prefill.count // 4, config.prefill.candidate_buffer_bytes)
        in_pool, in_buffers = (
            {Place.HOST: 1, Place.SHARED: 1},
            self._buffer_places(Place.PREFILL_GPU, config.prefill.count),
        )
        prefill = max(self._wanted(config.prefill.max_running_requests), context_bytes, config.prefill.kv_cache_bytes)
        entry = policy_entry(config.scheduling.policy)
        return [
            decode,
            *([swapped] if entry.schedules_iterations and Mechanism.SWAP in entry.uses else []),
            self._memory("prefill", "kv_cache_bytes", context_bytes, prefill, prefill_places),
            self._memory("prefill", "candidate_buffer_bytes", 0, buffers, in_buffers),
            self._memory("pool", "memory_bytes", context_bytes, pool, in_pool),
            *prefixes,
        ]

    def _buffer_places(self, gpu: Place, num_lenders: int) -> dict[Place, int]:
        if self.machine.gpu_bytes and lends_device_memory(self.config.engine):
            return {gpu: 1}
        return {Place.HOST: num_lenders, Place.SHARED: num_lenders}

    @property
    def _keeps_prefixes(self) -> bool:
        cache = self.config.prefix_cache
        if not isinstance(cache.host_bytes, DefaultSize):
            return cache.pool_bytes > 0
        if self._context_bytes:
            return False  # it would keep tokens without the states behind them
        return cache.enabled and not self.topology.is_separate and self.config.decode.count > 1

    def _prefixes(self, wanted: int) -> Memory:
        wanted *= self.config.decode.count
        return self._memory("prefix_cache", "host_bytes", 0, wanted, {Place.HOST: 1, Place.SHARED: 1})

    def running_requests(self, cache_bytes: int) -> int:
        """Return the largest batch of a decode worker on a GPU that has this memory for blocks; see gpu_limits."""
        max_running_requests = self.config.decode.max_running_requests
        if (
            not isinstance(max_running_requests, DefaultSize) or self.served.encoder is not None
        ):  # whose requests have no decodes
            return max_running_requests
        num_tokens = cache_bytes // self._token_bytes
        return running_requests(num_tokens, self._costs())

    def _costs(self) -> RooflineModel | None:
        if self.machine.gpu is None:
            return None
        shape = self.served.decoder.shape(self.served.name, self.served.dtype)
        try:
            return RooflineModel(shape, self.machine.gpu, tensor_parallel=self.config.engine.tensor_parallel)
        except ConfigError:  # it has no products of this dtype
            return None

    @property
    def _token_bytes(self) -> int:
        return self.served.block_layout(self.config.engine.block_size).token_bytes

    @property
    def _context_bytes(self) -> int:
        return self.served.block_layout(self.config.engine.block_size).context_bytes

    def _wanted(self, num_requests: int) -> int:
        num_states = 2 if self.config.prefix_cache.enabled else 1
        return num_requests * (REQUEST_TOKENS * self._token_bytes + num_states * self._context_bytes)

    def _memory(self, section: str, field: str, least: int, wanted: int, counts: Mapping[Place, int]) -> Memory:
        size = getattr(getattr(self.config, section), field)
        if not isinstance(size, DefaultSize):
            least = wanted = size
        return Memory(section, field, least, wanted, counts)


def worker_grammar_bytes(served: ServedModel) -> int:
    """Return the host memory of each worker for structured output, which any request may ask for; 0: an encoder."""
    return 0 if served.encoder is not None else grammar_bytes(served.config.vocab_size)


def _share(memories: list[Memory], location: Place, limit: int) -> float:
    least = sum(memory.least * memory.counts.get(location, 0) for memory in memories)
    more = sum(memory.wanted * memory.counts.get(location, 0) for memory in memories) - least
    return min(max((limit - least) / more, 0.0), 1.0) if more else 1.0


def is_any_set(config: ClusterConfig) -> bool:
    sections = (getattr(config, name) for name in SIZED)
    return any(
        not isinstance(getattr(section, field), DefaultSize)
        for section in sections
        for field in _MEMORY_FIELDS
        if hasattr(section, field)
    )


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

"""Plans the memories of a cluster on one machine: what has to fit, where it lies, how long a context that allows.

Every memory has a least size, which holds one request of the longest context, and a wanted one, which holds as many
tokens as a full batch of ordinary requests. Where the wanted ones do not fit they shrink together, down to the least.

A quarter of what is available stays free: nothing was asked for, and other programs of the machine, such as a browser
or a compiler, take a few GiB; mostly there is no swap, so that the system ends a process where memory is short. The
page cache needs room as well. Only a context that would be shorter than 16 384 tokens, or that was set, may take more,
up to seven eighths.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.config.sections import MIB, ClusterConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize
from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.gpu_limits import REQUEST_TOKENS, running_requests
from alignedserve.costmodel.hardware import Hardware
from alignedserve.costmodel.roofline import RooflineModel
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

"""The specification of a rank's or a stage's engine, and what a rank makes by it. Each finds its weights itself."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from alignedserve.config.sections import LoraConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.registry import check_libraries
from alignedserve.runtime.device.collectives import Collectives, ProcessGroupCollectives, SharedMemoryCollectives
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.memory_maps import map_file
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.native_pass import DecoderRanks
from alignedserve.runtime.kv.block_storage import BlockStorage, Stripe
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.lora.adapter_cache import SequenceAdapters
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_files import ModelSpec, load_or_draw
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.weight_loader import leave_rounded_rows_unwritten
from kernels.cpu.rank_exchange import RankExchange


class PartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that every rank or stage makes, over its part of the model."""

    model: ModelSpec
    size: int  # ranks or stages
    block_size: int  # tokens of a block
    num_blocks: int  # a block of the worker is one of every rank, or a part on every stage
    max_sequences: int
    max_context_len: int
    max_running: int | None = None  # as in EngineOptions: all record graphs of the same batches
    attention: str  # as in EngineSizes
    cache_dtype: str  # of keys and values
    num_threads: int  # of each one's computing
    has_int8_swaps: bool = False  # as in EngineSizes, like the next
    wants_shared_blocks: bool = False
    swap_space_bytes: int = 0  # of a rank; of a stage where the worker's blocks are on several hosts
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)  # which adapters requests may have

    @property
    def engine_options(self) -> EngineOptions:
        return EngineOptions(
            max_sequences=self.max_sequences,
            max_context_len=self.max_context_len,
            max_running=self.max_running,
            attention=self.attention,
        )


class RankEngineSpec(PartSpec, frozen=True, kw_only=True):
    """The engine that every rank makes, over its share of the model."""

    devices: tuple[str, ...]  # of each rank
    timeout_s: float  # for which a rank waits for others

    @property
    def shards(self) -> tuple[TensorShard, ...]:
        return tuple(TensorShard(rank, self.size) for rank in range(self.size))

    def layout(self, rank: int) -> BlockLayout:
        return self.shards[rank].local(self.model.config).block_layout(self.block_size, self.cache_dtype)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of all ranks' blocks."""
        return self.num_blocks * sum(self.layout(rank).block_bytes for rank in range(self.size))

    def device(self, rank: int) -> torch.device:
        return torch.device(self.devices[rank])


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a worker find each other."""

    exchange: int | None  # descriptor of the shared memory of their exchange; None: they make a process group
    path: Path  # by which they make it, in a folder of this user alone
    blocks: int | None  # descriptor of the memory of all blocks, on CPUs; None: each rank's are on its own device

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the open descriptors, which a process closes once it has joined and made its storage."""
        return tuple(descriptor for descriptor in (self.exchange, self.blocks) if descriptor is not None)


class RankStart(msgspec.Struct, frozen=True):
    """The first frame to a rank."""

    rank: int
    spec: RankEngineSpec
    meeting: Meeting  # descriptors as the process has them


def join(spec: RankEngineSpec, rank: int, meeting: Meeting) -> Collectives:
    """Join the other ranks. Raises ExchangeBroken if they do not come."""
    if meeting.exchange is not None:
        return SharedMemoryCollectives(RankExchange(meeting.exchange, rank, spec.size, timeout_s=spec.timeout_s))
    return ProcessGroupCollectives(meeting.path, rank, spec.size, spec.device(rank), timeout_s=spec.timeout_s)


def load_shard(spec: RankEngineSpec, collectives: Collectives, observer: LoadingObserver | None = None) -> Decoder:
    """Load one rank's share of the model. Raises ModelError."""
    rank, model = collectives.rank, spec.model
    ranks = DecoderRanks(collectives, model.config)
    weights = load_or_draw(model, spec.device(rank), observer=observer, shard=spec.shards[rank])
    if not spec.lora.is_enabled:
        leave_rounded_rows_unwritten(weights, model.config)
    return Decoder(ranks.local_config, weights, ranks)


def make_storage(spec: RankEngineSpec, rank: int, meeting: Meeting) -> BlockStorage:
    """Make one rank's storage. Raises NotEnoughMemory."""
    layout = spec.layout(rank)
    if meeting.blocks is None:
        check_libraries(spec.attention, layout, spec.num_blocks, spec.model.config, spec.device(rank))
        return BlockStorage(layout, spec.num_blocks, spec.device(rank), part=ArenaPart(rank, spec.size))
    memory = torch.frombuffer(map_file(meeting.blocks, spec.memory_bytes), dtype=torch.uint8)
    runs = layout.runs_per_block
    return BlockStorage(layout, spec.num_blocks, stripe=Stripe(memory, rank * runs, spec.size * runs))


def whole_storage(spec: RankEngineSpec, layout: BlockLayout, meeting: Meeting) -> BlockStorage | None:
    """Return the storage of all ranks' parts, in blocks of the worker's layout; None: the parts are on devices."""
    if meeting.blocks is None:
        return None
    memory = torch.frombuffer(map_file(meeting.blocks, spec.memory_bytes), dtype=torch.uint8)
    return BlockStorage(layout, spec.num_blocks, stripe=Stripe(memory, 0, layout.runs_per_block))


def make_adapters(spec: RankEngineSpec, rank: int) -> SequenceAdapters:
    model = spec.model
    return SequenceAdapters(spec.lora, model.config, torch_dtype(model.dtype), spec.device(rank), spec.shards[rank])

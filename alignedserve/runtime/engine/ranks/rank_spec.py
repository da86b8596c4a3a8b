"""The specification of one rank's engine: sizes are of the rank, weights are found by each rank itself."""

from dataclasses import dataclass
from pathlib import Path

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.registry import try_libraries
from alignedserve.runtime.device.collectives import Collectives, ProcessGroupCollectives, SharedMemoryCollectives
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.host_memory.shared_pages import map_file
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.decoder_ranks import DecoderRanks
from alignedserve.runtime.engine.ranks.part_spec import PartSpec
from alignedserve.runtime.kv.block_storage import BlockStorage, Stripe
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.lora.sequence_adapters import SequenceAdapters
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_files import load_or_draw
from alignedserve.runtime.model.weights.decoder_weights import leave_rounded_rows_unwritten
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from kernels.cpu.rank_exchange import RankExchange


class RankEngineSpec(PartSpec, frozen=True, kw_only=True):
    """The engine that every rank makes, over its share of the model."""

    devices: tuple[str, ...]  # of each rank
    timeout_s: float  # for which a rank waits for others

    @property
    def shards(self) -> tuple[TensorShard, ...]:
        """Return every rank's share."""
        return tuple(TensorShard(rank, self.size) for rank in range(self.size))

    def layout(self, rank: int) -> BlockLayout:
        """Return the layout of a rank's blocks."""
        return self.shards[rank].local(self.model.config).block_layout(self.block_size, self.cache_dtype)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of all ranks' blocks."""
        return self.num_blocks * sum(self.layout(rank).block_bytes for rank in range(self.size))

    def device(self, rank: int) -> torch.device:
        """Return a rank's device."""
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
        return tuple(one for one in (self.exchange, self.blocks) if one is not None)


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
        try_libraries(spec.attention, layout, spec.num_blocks, spec.model.config, spec.device(rank))
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

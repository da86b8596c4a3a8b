"""The specification of a worker's stages, and what each makes by it."""

import os
from functools import cached_property

import msgspec
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.memory_maps import map_file
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.ranks.rank_spec import PartSpec
from alignedserve.runtime.kv.block_storage import BlockStorage, Stripe
from alignedserve.runtime.lora.adapter_cache import SequenceAdapters
from alignedserve.runtime.model.sharding.layer_stages import LayerStage, layer_stages, staged_layout
from alignedserve.runtime.model.weight_files import load_or_draw
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.weight_loader import leave_rounded_rows_unwritten

_CPU = torch.device("cpu")


class StageSpec(PartSpec, frozen=True, kw_only=True, dict=True):
    """The engine that every stage makes, over its layers."""

    @cached_property
    def stages(self) -> tuple[LayerStage, ...]:
        return layer_stages(self.model.config, self.size)

    def layout(self, index: int) -> BlockLayout:
        return self.stages[index].local(self.model.config).block_layout(self.block_size, self.cache_dtype)

    @property
    def whole_layout(self) -> BlockLayout:
        """Return the layout of a block: the parts of the stages, one behind another."""
        return staged_layout(self.model.config, self.size, self.block_size, self.cache_dtype)

    @property
    def memory_bytes(self) -> int:
        return self.num_blocks * self.whole_layout.block_bytes


class StageStart(msgspec.Struct, frozen=True):
    """The first frame to a stage."""

    index: int
    spec: StageSpec
    blocks: int | None  # descriptor of the memory of all blocks, as the process has it; None: they are its own


def load_stage(spec: StageSpec, index: int, observer: LoadingObserver | None = None) -> Decoder:
    stage, model = spec.stages[index], spec.model
    weights = load_or_draw(model, _CPU, observer=observer, stage=stage)
    local = stage.local(model.config)
    if not spec.lora.is_enabled:
        leave_rounded_rows_unwritten(weights, local)
    return Decoder(local, weights)


def make_adapters(spec: StageSpec, index: int) -> SequenceAdapters:
    model = spec.model
    return SequenceAdapters(spec.lora, model.config, torch_dtype(model.dtype), _CPU, spec.stages[index])


def make_stage_storage(spec: StageSpec, index: int, blocks: int | None) -> BlockStorage:
    """Make one stage's storage; `blocks` as in StageStart. Raises NotEnoughMemory."""
    if blocks is None:
        return BlockStorage(spec.layout(index), spec.num_blocks)
    first = sum(spec.layout(before).runs_per_block for before in range(index))
    return BlockStorage(spec.layout(index), spec.num_blocks, stripe=_stripe(spec, blocks, first))


def make_whole_storage(spec: StageSpec, blocks: int) -> BlockStorage:
    return BlockStorage(spec.whole_layout, spec.num_blocks, stripe=_stripe(spec, blocks, 0))


def close_blocks(blocks: int | None) -> None:
    if blocks is not None:
        os.close(blocks)


def _stripe(spec: StageSpec, blocks: int, first_run: int) -> Stripe:
    memory = torch.frombuffer(map_file(blocks, spec.memory_bytes), dtype=torch.uint8)
    return Stripe(memory, first_run, spec.whole_layout.runs_per_block)

"""Defines what each rank or stage of a worker is told of the model and of its own sizes."""

import msgspec

from alignedserve.config.sections import LoraConfig
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.model.weight_files import ModelSpec


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

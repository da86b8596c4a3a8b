"""The parameters of a benchmark of the engine alone."""

from dataclasses import dataclass

import numpy as np

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import FP8, INT8
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import AUTO
from benchmarks.engine.workloads import RequestGroup


@dataclass(frozen=True, slots=True)
class EngineBenchmarkSpec:
    """Parameters of the benchmark. Raises ConfigError naming the field."""

    model: str  # a name in SHAPES (random weights) or a model folder
    groups: tuple[RequestGroup, ...]
    dtype: str = "float32"
    quantization: str | None = None  # of the linear layers: int8
    kv_cache_dtype: str = "auto"  # of keys and values: auto (`dtype`), int8 or fp8
    device: str = "cpu"
    attention: str = AUTO  # one of CHOICES of runtime.attention
    max_sequences: int = 128
    max_step_tokens: int = 2048  # prefill tokens of one step
    block_size: int = 16
    seed: int = 0
    tensor_parallel: int = 1  # ranks, which share the threads

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("groups must name at least one group of requests.")
        if self.quantization not in (None, INT8):
            raise ConfigError(f"quantization {self.quantization!r} must be int8.")
        if self.kv_cache_dtype not in ("auto", INT8, FP8):
            raise ConfigError(f"kv_cache_dtype {self.kv_cache_dtype!r} must be auto, int8 or fp8.")
        for name in ("max_sequences", "max_step_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")

    @property
    def cache_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def max_context_len(self) -> int:
        return max(group.prompt_len + group.output_len for group in self.groups)

    @property
    def num_blocks(self) -> int:
        """Return the blocks of as many of the longest requests as run at once."""
        blocks = [blocks_for(group.prompt_len + group.output_len, self.block_size) for group in self.groups]
        counts = [group.num_requests for group in self.groups]
        return int(np.sort(np.repeat(blocks, counts))[-self.max_sequences :].sum())

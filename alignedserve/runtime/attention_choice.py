"""Chooses how attention is computed for one engine."""

import importlib

from alignedserve.runtime.attention import TORCH, TRITON, AttentionPlanner, attention_level
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.dtypes import torch_dtype
from alignedserve.runtime.gathered_attention import GatheredPlanner
from alignedserve.runtime.model_config import ModelConfig
from alignedserve.runtime.paged_attention import PagedPlanner
from alignedserve.runtime.sequences import SequenceTable
from kernels.paged import PagedAttention


def attention_planner(
    choice: str, table: SequenceTable, storage: BlockStorage, config: ModelConfig
) -> AttentionPlanner:
    """The planner that `choice` means here. Raises ConfigError for one that cannot be had."""
    level = attention_level(choice, storage.device, torch_dtype(storage.layout.dtype))
    if level == TORCH:
        return GatheredPlanner(table, storage, config.sliding_window)
    if level == TRITON:
        module = importlib.import_module("alignedserve.runtime.gpu_attention")  # loads Triton
        planner: AttentionPlanner = module.GpuPlanner(table, storage, config.sliding_window, config.group_size)
        return planner
    paged = PagedAttention(storage.blocks, group=config.group_size, level=level)
    return PagedPlanner(table, config.sliding_window, paged)

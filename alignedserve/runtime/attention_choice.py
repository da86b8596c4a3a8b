"""Chooses how attention is computed for one engine."""

import importlib
import logging
from typing import cast

from alignedserve.runtime.attention import TORCH, TRITON, AttentionPlanner, attention_level
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.dtypes import torch_dtype
from alignedserve.runtime.gathered_attention import GatheredPlanner
from alignedserve.runtime.model_config import ModelConfig
from alignedserve.runtime.paged_attention import PagedPlanner
from alignedserve.runtime.sequences import SequenceTable
from kernels.paged import PagedAttention

logger = logging.getLogger(__name__)


def attention_planner(
    choice: str, table: SequenceTable, storage: BlockStorage, config: ModelConfig
) -> AttentionPlanner:
    """The planner that `choice` means here; plain PyTorch, with a warning, where the GPU kernels turn out not to run.
    Raises ConfigError for one that cannot be had."""
    level = attention_level(choice, storage.device, torch_dtype(storage.layout.dtype))
    if level == TRITON:
        gpu_attention = importlib.import_module("alignedserve.runtime.gpu_attention")  # loads Triton
        if gpu_attention.gpu_attention_works(storage.layout, config.group_size, storage.device):
            planner = gpu_attention.GpuPlanner(table, storage, config.sliding_window, config.group_size)
            choice_of_prompts = gpu_attention.choose_prompt_attention(planner)
            if choice_of_prompts is not None:
                logger.info("whole prompts are computed by %s", choice_of_prompts)
            return cast(AttentionPlanner, planner)
    if level in (TORCH, TRITON):
        return GatheredPlanner(table, storage, config.sliding_window)
    paged = PagedAttention(storage.blocks, group=config.group_size, level=level)
    return PagedPlanner(table, config.sliding_window, paged)

"""Bidirectional attention of whole prompts: by the native kernels, or in plain PyTorch prompt by prompt."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import TORCH, TRITON, attention_level
from alignedserve.runtime.encoder.prompt_batch import PromptBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from kernels.cpu.paged_attention import PagedAttention
from kernels.rotary import HeadPlacement


class PassAttention(Protocol):
    """The attention of one pass, the same on every layer."""

    def __call__(self, fused: Tensor) -> Tensor:
        """Attend fused [tokens, 3 * hidden_size], queries, keys and values of a layer -> [tokens, hidden_size]."""


class PromptAttention(Protocol):
    """Plans the attention of passes."""

    def plan(self, batch: PromptBatch) -> PassAttention:
        """Plan a pass over these prompts."""


def prompt_attention(choice: str, config: EncoderConfig, storage: BlockStorage, dtype: torch.dtype) -> PromptAttention:
    """Return the attention for `choice`, one of CHOICES. Raises ConfigError for an unavailable one."""
    if choice == TRITON:
        raise ConfigError("attention triton is for decoders; leave engine.attention_backend at auto.")
    level = attention_level(choice, storage.device, dtype)
    if level in (TORCH, TRITON):
        return _TorchAttention(config)
    return _NativeAttention(config, storage, level)


class _NativeAttention:
    def __init__(self, config: EncoderConfig, storage: BlockStorage, level: str) -> None:
        self._shape = (config.num_heads, 1, config.head_dim)
        self._paged = PagedAttention(storage.blocks, group=1, level=level)
        dtype = storage.blocks.dtype
        self._place = HeadPlacement(config.num_heads, config.num_heads, config.head_dim, dtype, storage.device)
        self._cached = (storage.key_slots(0), storage.value_slots(0))

    def plan(self, batch: PromptBatch) -> PassAttention:
        rows, num_threads = np.arange(len(batch.lengths)), torch.get_num_threads()
        args = (batch.block_tables, rows, batch.lengths, batch.lengths, None, num_threads)
        plan = self._paged.plan_chunks(*args, is_bidirectional=True)
        slots = torch.from_numpy(batch.slots)

        def attend(fused: Tensor) -> Tensor:
            width = fused.shape[1] // 3
            self._place(fused, None, None, slots, *self._cached)
            queries = fused[:, :width].view(len(fused), *self._shape)
            attended = torch.empty(queries.shape, dtype=fused.dtype)
            self._paged.run(plan, queries, attended, 0, is_windowed=False)
            return attended.view(len(fused), width)

        return attend


class _TorchAttention:
    def __init__(self, config: EncoderConfig) -> None:
        self._heads = (3, config.num_heads, config.head_dim)

    def plan(self, batch: PromptBatch) -> PassAttention:
        lengths = batch.lengths.tolist()

        def attend(fused: Tensor) -> Tensor:
            return torch.cat([self._attend_one(prompt) for prompt in torch.split(fused, lengths)])

        return attend

    def _attend_one(self, prompt: Tensor) -> Tensor:
        heads = prompt.view(len(prompt), *self._heads).permute(1, 2, 0, 3)  # [3, heads, tokens, head_dim]
        queries, keys, values = heads.contiguous()[:, None].unbind()
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        return attended[0].transpose(0, 1).reshape(len(prompt), -1)

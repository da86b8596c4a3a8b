"""One encoder for all families: they differ in tensors' names and options of EncoderConfig.

Bidirectional attention of whole prompts: by the native kernels, or in plain PyTorch prompt by prompt."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import TORCH, TRITON, attention_level
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.encoder.prompt_batch import PromptBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig, HeadActivation, Pooling
from alignedserve.runtime.model.encoder.encoder_weights import DenseLayer, EncoderLayer, EncoderWeights
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


_ACTIVATIONS: Mapping[HeadActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        HeadActivation.IDENTITY: lambda x: x,
        HeadActivation.SIGMOID: torch.sigmoid,
        HeadActivation.TANH: torch.tanh,
        HeadActivation.RELU: torch.relu,
    }
)


class TextHead:
    """Pooling and the layers after it; of a cross-encoder the first token and its classifier. Texts are treated one by
    one: elementwise functions of a library may round the last elements of an array in another way, so that what shares
    an array could change a result."""

    def __init__(self, config: EncoderConfig, layers: Sequence[DenseLayer]) -> None:
        self._pooling = Pooling.CLS if config.score is not None else config.embedding.pooling
        self._layers = tuple(layers)

    def __call__(self, hidden: Tensor) -> Tensor:
        vector = _POOLINGS[self._pooling](hidden).float()
        for layer in self._layers:
            vector = _ACTIVATIONS[layer.activation](layer.product(vector[None])[0])
        return vector


def _weighted_mean(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64, device=hidden.device)[:, None]
    return (hidden.double() * weights).sum(0) / weights.sum()


_POOLINGS: Mapping[Pooling, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Pooling.CLS: lambda hidden: hidden[0],
        Pooling.MEAN: lambda hidden: hidden.double().mean(0),
        Pooling.MAX: lambda hidden: hidden.amax(0),
        Pooling.MEAN_SQRT: lambda hidden: hidden.double().sum(0) / len(hidden) ** 0.5,
        Pooling.WEIGHTED_MEAN: _weighted_mean,
        Pooling.LAST: lambda hidden: hidden[-1],
    }
)


class Encoder:
    """A model ready to run. A row's result depends on its own prompt alone, bit for bit, with the native kernels."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights, attention: PromptAttention) -> None:
        self.config = config
        self.attention_s = 0.0  # of the latest pass
        self._weights, self._attention = weights, attention
        self._head = TextHead(config, weights.head)

    @torch.inference_mode()
    def encode(self, batch: PromptBatch) -> list[Tensor]:
        """Compute a float32 vector [vector_width] of each prompt, on the host; a score has one element."""
        hidden = self.hidden_states(batch)
        bounds = batch.bounds.tolist()
        rows = [hidden[first:last] for first, last in pairwise(bounds)]
        return [self._head(row).cpu() for row in rows]

    @torch.inference_mode()
    def hidden_states(self, batch: PromptBatch) -> Tensor:
        attention = self._attention.plan(batch)
        self.attention_s = 0.0
        hidden = self._embed(batch)
        for layer in self._weights.layers:
            hidden = self._run_layer(hidden, layer, attention)
        return hidden

    def _embed(self, batch: PromptBatch) -> Tensor:
        weights = self._weights
        arrays = [batch.token_ids, batch.positions, batch.token_types]
        token_ids, positions, token_types = to_device(arrays, weights.words.device)
        hidden = weights.words.index_select(0, token_ids)
        if weights.token_types is not None:  # a model with one type has it in both texts of a pair
            hidden += weights.token_types.index_select(0, token_types.clamp_max(len(weights.token_types) - 1))
        hidden += weights.positions.index_select(0, positions)
        return weights.norm(hidden)

    def _run_layer(self, hidden: Tensor, layer: EncoderLayer, attention: PassAttention) -> Tensor:
        fused = layer.qkv(hidden)
        started = time.perf_counter()
        attended = attention(fused)
        self.attention_s += time.perf_counter() - started
        hidden = layer.attention_norm.after_adding_(hidden, layer.output(attended))
        return layer.mlp_norm.after_adding_(hidden, layer.mlp(hidden))

"""One encoder for all families: they differ in tensors' names and options of EncoderConfig."""

import time
from itertools import pairwise

import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.encoder.prompt_attention import PassAttention, PromptAttention
from alignedserve.runtime.encoder.prompt_batch import PromptBatch
from alignedserve.runtime.encoder.text_heads import TextHead
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.encoder.encoder_weights import EncoderLayer, EncoderWeights


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
        return [self._head(own).cpu() for own in rows]

    @torch.inference_mode()
    def hidden_states(self, batch: PromptBatch) -> Tensor:
        """Compute the last hidden states [tokens, hidden_size]."""
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

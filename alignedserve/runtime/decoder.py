"""One decoder for all families: the differences are options of ModelConfig, not branches over names."""

import math
import time

import torch
from torch import Tensor

from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.dtypes import dtype_name
from alignedserve.runtime.forward_batch import ChunkPlan, DecodeBucket, ForwardBatch
from alignedserve.runtime.model_config import ModelConfig, RopeConfig, RopeScaling
from alignedserve.runtime.weights import DecoderWeights, LayerWeights
from kernels.activation import ACTIVATIONS, gated
from kernels.attention import GatherBuffers, attend_chunk, attend_decode, gather_context
from kernels.rotary import rotary_angles, rotate_

Rotation = tuple[Tensor, Tensor]


class Decoder:
    """A model ready to run. Keys and values live in the storage it is given; of a pass it keeps only `attention_s`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._activation = ACTIVATIONS[config.activation.value]
        self._windowed = frozenset(config.windowed_layers)
        self._buffers = GatherBuffers(self.device)
        # Seconds that the latest pass spent in attention of decoding sequences; 0 where work is only queued (a GPU).
        self.attention_s = 0.0
        self._frequencies = None
        if config.rope is not None:
            self._frequencies = inverse_frequencies(config.rope).to(self.device)

    @property
    def dtype_name(self) -> str:
        """The dtype as block layouts spell it."""
        return dtype_name(self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: BlockStorage) -> Tensor:
        """Write the keys and values of all tokens of the batch; return their last hidden vectors [tokens, hidden_size].

        The result is what `logits` takes: the final norm is not yet applied, since few rows need it.
        """
        if len(batch.fresh_blocks):
            storage.zero_blocks(batch.fresh_blocks)
        hidden = self._embed(batch)
        rotation = None
        if self._frequencies is not None:
            rotation = rotary_angles(batch.positions, self._frequencies, self.dtype)
        run = _Pass(batch, storage, rotation)
        for layer, weights in enumerate(self._weights.layers):
            hidden = self._run_layer(hidden, layer, weights, run)
        self.attention_s = run.attention_s if self.device.type == "cpu" else 0.0
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size], rows >= 1 -> logits [rows, vocab_size] float32."""
        weights = self._weights
        if weights.final_norm is not None:
            hidden = weights.final_norm(hidden)
        if weights.project_out is not None:
            hidden = weights.project_out(hidden)
        return weights.lm_head(hidden).float()

    def _embed(self, batch: ForwardBatch) -> Tensor:
        weights = self._weights
        hidden = weights.embedding.index_select(0, batch.token_ids)
        if weights.project_in is not None:
            hidden = weights.project_in(hidden)
        if weights.positions is not None:
            hidden = hidden + weights.positions.index_select(0, batch.positions + self.config.position_offset)
        return hidden

    def _run_layer(self, hidden: Tensor, layer: int, weights: LayerWeights, run: "_Pass") -> Tensor:
        config = self.config
        if not config.is_norm_first:
            hidden = weights.attention_norm(self._attention(hidden, layer, weights, run).add_(hidden))
            return weights.mlp_norm(self._mlp(hidden, weights).add_(hidden))
        attended = self._attention(weights.attention_norm(hidden), layer, weights, run)
        if config.has_parallel_residual:
            return self._mlp(weights.mlp_norm(hidden), weights).add_(attended).add_(hidden)
        hidden = attended.add_(hidden)
        return self._mlp(weights.mlp_norm(hidden), weights).add_(hidden)

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        inner = weights.gate_up(x)
        inner = gated(inner, self._activation) if self.config.is_gated else self._activation(inner)
        return weights.down(inner)

    def _attention(self, x: Tensor, layer: int, weights: LayerWeights, run: "_Pass") -> Tensor:
        config, batch, storage = self.config, run.batch, run.storage
        fused = weights.qkv(x)
        query_width, kv_width = config.query_width, config.kv_width
        queries = fused[:, :query_width]
        keys, values = fused[:, query_width : query_width + kv_width], fused[:, query_width + kv_width :]
        self._position_heads(fused, weights, run.rotation)
        storage.key_slots(layer).index_copy_(0, batch.slots, keys)
        storage.value_slots(layer).index_copy_(0, batch.slots, values)
        queries = _split_heads(queries, config.num_kv_heads, config.group_size, config.head_dim)
        attended = torch.empty(queries.shape, dtype=x.dtype, device=x.device)
        is_windowed = layer in self._windowed
        started = time.perf_counter()
        for bucket in batch.buckets:
            rows = slice(bucket.first, bucket.last)
            attended[rows] = self._attend_bucket(queries[rows], layer, bucket, is_windowed, storage)
        run.attention_s += time.perf_counter() - started
        for chunk in batch.chunks:
            rows = slice(chunk.first, chunk.last)
            new = (keys[rows], values[rows])
            attended[rows] = self._attend_chunk(queries[rows], new, layer, chunk, is_windowed, storage)
        return weights.output(attended.view(-1, query_width))

    def _position_heads(self, fused: Tensor, weights: LayerWeights, rotation: Rotation | None) -> None:
        """Normalise and rotate queries and keys in place. fused [tokens, query_width + 2 * kv_width]."""
        config = self.config
        heads = _split_heads(fused, -1, config.head_dim)
        if weights.query_norm is not None and weights.key_norm is not None:
            queries = heads[:, : config.num_heads]
            keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
            queries.copy_(weights.query_norm(queries))
            keys.copy_(weights.key_norm(keys))
        if rotation is not None:
            rotate_(heads[:, : config.num_heads + config.num_kv_heads], *rotation)

    def _attend_bucket(
        self, queries: Tensor, layer: int, bucket: DecodeBucket, is_windowed: bool, storage: BlockStorage
    ) -> Tensor:
        mask = bucket.mask if bucket.window_mask is None or not is_windowed else bucket.window_mask
        runs = (storage.key_runs(layer), storage.value_runs(layer))
        return attend_decode(queries, *runs, bucket.run_ids, mask, self._buffers)

    def _attend_chunk(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        layer: int,
        chunk: ChunkPlan,
        is_windowed: bool,
        storage: BlockStorage,
    ) -> Tensor:
        shape = (chunk.context_len, self.config.num_kv_heads, self.config.head_dim)
        if chunk.run_ids is None:
            keys, values = new[0].view(shape), new[1].view(shape)
        else:
            keys = gather_context(storage.key_runs(layer), chunk.run_ids, shape, "keys", self._buffers)
            values = gather_context(storage.value_runs(layer), chunk.run_ids, shape, "values", self._buffers)
        mask = chunk.window_mask if is_windowed and chunk.window_mask is not None else chunk.mask
        return attend_chunk(queries, keys, values, mask)


class _Pass:
    """What all layers of one forward pass share."""

    __slots__ = ("attention_s", "batch", "rotation", "storage")

    def __init__(self, batch: ForwardBatch, storage: BlockStorage, rotation: Rotation | None) -> None:
        self.batch = batch
        self.storage = storage
        self.rotation = rotation
        self.attention_s = 0.0


def _split_heads(x: Tensor, *shape: int) -> Tensor:
    """x [tokens, width], rows possibly strided -> the same memory as [tokens, *shape]."""
    return x.view(x.shape[0], *shape)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair: [rotary_dim / 2] float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling is RopeScaling.LINEAR:
        return frequencies / rope.factor
    if rope.scaling is RopeScaling.LLAMA3:
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are interpolated."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = rope.original_context_len / wavelengths
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / rope.factor

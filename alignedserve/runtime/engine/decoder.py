"""One decoder for all model families: they differ in options of ModelConfig, not in branches over names."""

import math
import time

import torch
from torch import Tensor

from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.engine.forward_batch import ForwardBatch
from alignedserve.runtime.engine.hidden_pass import HiddenPass, Rotation
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import ModelConfig, RopeConfig, RopeScaling
from alignedserve.runtime.model.weight_loader import DecoderWeights, LayerWeights
from kernels.rotary import HeadPlacement, rotary_angles

# On a CPU the feed-forward part computes so many rows at a time: intermediate results then stay in the cache, and in
# memory that was used before. 2048 rows of 896 x 4864 in float32: 575 ms at once, 498 ms in four parts.
_TILE_ROWS = 512


class Decoder:
    """A model ready to run. Keys and values live in the storage that is passed in; a pass leaves only its times."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._place = HeadPlacement(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, self.device)
        self._windowed = frozenset(config.windowed_layers)
        # Seconds that the latest pass spent in attention, of decoding sequences and of chunks; 0 where work is only
        # queued (a GPU).
        self.attention_s = 0.0
        self.chunk_attention_s = 0.0
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
        for block_id, first_slot in batch.unclean_tails:
            storage.zero_tail(block_id, first_slot)
        hidden = self._embed(batch)
        run = _Pass(batch, storage, self._rotation(batch.positions))
        if batch.hidden is not None:
            run.hidden = HiddenPass(batch.hidden, storage, self._place, self._rotation(batch.hidden.positions))
        pending = None
        for layer, weights in enumerate(self._weights.layers):
            hidden, pending = self._run_layer(hidden, pending, layer, weights, run)
        if self.device.type == "cpu":
            self.attention_s, self.chunk_attention_s = run.attention_s, run.chunk_attention_s
        return hidden if pending is None else hidden.add_(pending)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [rows, hidden_size], rows >= 1 -> logits [rows, vocab_size], dtype of the weights."""
        weights = self._weights
        if weights.final_norm is not None:
            hidden = weights.final_norm(hidden)
        if weights.project_out is not None:
            hidden = weights.project_out(hidden)
        return weights.lm_head(hidden)

    def _rotation(self, positions: Tensor) -> Rotation | None:
        if self._frequencies is None:
            return None
        return rotary_angles(positions, self._frequencies, self._place.angle_dtype)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        weights = self._weights
        hidden = weights.embedding.index_select(0, batch.token_ids)
        if weights.project_in is not None:
            hidden = weights.project_in(hidden)
        if weights.positions is not None:
            hidden = hidden + weights.positions.index_select(0, batch.positions + self.config.position_offset)
        return hidden

    def _run_layer(
        self, hidden: Tensor, pending: Tensor | None, layer: int, weights: LayerWeights, run: "_Pass"
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer; return the residual stream, updated in place, and what the next norm adds to it.

        Both [tokens, hidden_size].
        """
        config = self.config
        if not config.is_norm_first:
            if run.hidden is not None:
                run.hidden.recompute(hidden, layer, weights, is_norm_first=False)
            hidden = weights.attention_norm.after_adding_(hidden, self._attention(hidden, layer, weights, run))
            return weights.mlp_norm.after_adding_(hidden, self._mlp(hidden, weights)), None
        norm = weights.attention_norm
        normed = norm(hidden) if pending is None else norm.after_adding_(hidden, pending)
        if run.hidden is not None:
            run.hidden.recompute(hidden, layer, weights, is_norm_first=True)
        attended = self._attention(normed, layer, weights, run)
        if config.has_parallel_residual:
            return hidden, self._mlp(weights.mlp_norm(hidden), weights).add_(attended)
        return hidden, self._mlp(weights.mlp_norm.after_adding_(hidden, attended), weights)

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        num_tiles = -(-x.shape[0] // _TILE_ROWS) if self.device.type == "cpu" else 1
        if num_tiles == 1:
            return weights.down(weights.gate_up(x))
        return torch.cat([weights.down(weights.gate_up(tile)) for tile in x.chunk(num_tiles)])

    def _attention(self, x: Tensor, layer: int, weights: LayerWeights, run: "_Pass") -> Tensor:
        config, batch, storage = self.config, run.batch, run.storage
        fused = weights.qkv(x)
        query_width, kv_width = config.query_width, config.kv_width
        queries = fused[:, :query_width]
        keys, values = fused[:, query_width : query_width + kv_width], fused[:, query_width + kv_width :]
        if run.hidden is None:
            cached = (storage.key_slots(layer), storage.value_slots(layer))
            self._place(fused, weights.head_norms, run.rotation, batch.slots, *cached)
        else:
            run.hidden.place(fused, layer, weights, run.rotation, batch.slots)
        queries = _split_heads(queries, config.num_kv_heads, config.group_size, config.head_dim)
        attended = torch.empty(queries.shape, dtype=x.dtype, device=x.device)
        is_windowed = layer in self._windowed
        started = time.perf_counter()
        batch.attention.decode(queries, attended, layer, is_windowed)
        decoded = time.perf_counter()
        run.attention_s += decoded - started
        batch.attention.chunks(queries, (keys, values), attended, layer, is_windowed)
        run.chunk_attention_s += time.perf_counter() - decoded
        return weights.output(attended.view(-1, query_width))


class _Pass:
    """The state that all layers of one forward pass share."""

    __slots__ = ("attention_s", "batch", "chunk_attention_s", "hidden", "rotation", "storage")

    def __init__(self, batch: ForwardBatch, storage: BlockStorage, rotation: Rotation | None) -> None:
        self.batch = batch
        self.storage = storage
        self.rotation = rotation
        self.hidden: HiddenPass | None = None  # of sequences with a hidden cache
        self.attention_s = 0.0
        self.chunk_attention_s = 0.0


def _split_heads(x: Tensor, *shape: int) -> Tensor:
    """View x [tokens, width], rows possibly strided, as [tokens, *shape]."""
    return x.view(x.shape[0], *shape)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return radians per position of each rotated pair: [rotary_dim / 2] float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.scaling is RopeScaling.LINEAR:
        return frequencies / rope.factor
    if rope.scaling is RopeScaling.LLAMA3:
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, and interpolate between."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = rope.original_context_len / wavelengths
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / rope.factor

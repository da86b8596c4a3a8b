"""Steps of decodes through all layers by one call of the native kernels, for models and steps that they cover.

What the ranks of a worker do together within one pass of their decoder."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from alignedserve.runtime.attention.registry import PagedStep, StepOfKinds
from alignedserve.runtime.device.collectives import Collectives
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch, Rotation
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.model_config import ModelConfig, read_places
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.weight_loader import DecoderWeights, LayerWeights
from alignedserve.runtime.model.weights.weight_source import RowLookup
from kernels.activation import LayerNorm, Norm, RmsNorm
from kernels.cpu.decode_pass import (
    AllowedTokens,
    CachePart,
    CacheSlots,
    DecodePass,
    HeadParts,
    HighestLogits,
    LayerParts,
    NativeParts,
    NativeProduct,
    PassTimes,
    Pause,
    decode_pass_available,
)
from kernels.cpu.rank_exchange import RankExchange
from kernels.cpu.rows import HeadRows, NormRows
from kernels.feed_forward import FeedForwardPart
from kernels.linear import Projection
from kernels.lora import AdapterRows
from kernels.rotary import HeadPlacement


class DecoderRanks:
    """One rank's end of a decoder whose heads, inner columns and vocabulary are divided among several."""

    def __init__(self, collectives: Collectives, config: ModelConfig) -> None:
        self.rank = collectives.rank
        self._collectives = collectives
        shards = [TensorShard(rank, collectives.size) for rank in range(collectives.size)]
        self._tokens = [shard.tokens(config) for shard in shards]
        self._own = self._tokens[self.rank]
        self._widest = max(span.size for span in self._tokens)
        self._nothing = torch.zeros(1, dtype=torch.uint8)
        self.local_config = shards[self.rank].local(config)

    @property
    def num_own_tokens(self) -> int:
        return self._own.size

    @property
    def exchange(self) -> RankExchange | None:
        """Return the shared memory that a native pass adds up through; None: it cannot."""
        return self._collectives.exchange

    def embed(self, embedding: RowLookup, token_ids: Tensor) -> Tensor:
        """Look up token_ids [tokens] among all ranks' rows -> [tokens, width]; `embedding`: this rank's."""
        places = token_ids - self._own.start
        is_own = (places >= 0) & (places < self._own.size)
        rows = embedding.index_select(0, places.clamp_(0, self._own.size - 1))
        return self.add_up(rows.mul_(is_own[:, None]))

    def add_up(self, part: Tensor) -> Tensor:
        """Add up the ranks' parts of a product [tokens, width], which may be overwritten."""
        return self._collectives.all_reduce_(part.contiguous())

    def wait_for_all(self) -> None:
        self._collectives.gather(self._nothing)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Join logits [rows, own tokens] -> [rows, vocab_size]; on ranks but the first: [rows, 0]."""
        num_rows, count = logits.shape
        padded = logits.contiguous()
        if count < self._widest:
            padded = torch.nn.functional.pad(padded, (0, self._widest - count))
        parts = self._collectives.gather(padded)
        if parts is None:
            return logits[:, :0]
        spans = zip(parts, self._tokens, strict=True)
        return torch.cat([part[:, : span.size] for part, span in spans], dim=1).view(num_rows, -1)

    def gather_highest(self, highest: HighestLogits) -> HighestLogits:
        """Find the highest logits of all tokens among those of each rank's own; on ranks but the first meaningless."""
        packed = torch.stack((highest.token_ids, highest.values.view(torch.int32).to(torch.int64)), dim=1)
        parts = self._collectives.gather(packed)
        if parts is None:
            return highest
        values = parts[:, :, 1].to(torch.int32).view(torch.float32)  # [ranks, rows]
        best = values.max(dim=0)
        # Of equal ones the first rank's: its tokens come first. A NaN of any rank is the highest.
        is_best = (values == best.values) | (values.isnan() & best.values.isnan())
        first = is_best.to(torch.int8).argmax(dim=0)
        starts = torch.tensor([span.start for span in self._tokens])
        token_ids = parts[:, :, 0].gather(0, first[None])[0] + starts[first]
        return HighestLogits(token_ids.masked_fill(best.values.isnan(), 0), best.values.contiguous())


_PART_S = 0.002  # of a pass that may stand still: shorter parts would cost more than they bring
_MOST_SLICES = 16
_LEAST_S = 1e-6


class _Stopped:
    def __init__(self, between_layers: Callable[[], object]) -> None:
        self._between_layers = between_layers
        self.seconds = 0.0

    def call(self) -> None:
        began = time.perf_counter()
        self._between_layers()
        self.seconds += time.perf_counter() - began


class NativePass:
    """All layers of a model whose every part has a native kernel; only for steps without chunks and hidden caches."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        head_rows: HeadRows,
        config: ModelConfig,
        head: HeadParts | None,
        ranks: DecoderRanks | None = None,
    ) -> None:
        """`head`: None where logits are computed apart. `ranks`: that compute the layers together."""
        norm = layers[0].attention_norm
        exchange = None if ranks is None else ranks.exchange
        self._pass = DecodePass(layers, head_rows, config.hidden_size, norm.dtype, head, exchange)
        self._num_layers, self._hidden_size = len(layers), config.hidden_size
        rung = read_places(config, has_rings=True)
        # Of each layer, where all have their keys and values in the blocks of tokens, and where some have rings.
        self._places = (list(range(len(layers))), [rung[layer] for layer in range(len(layers))])
        self._num_tokens = config.vocab_size if ranks is None else ranks.num_own_tokens
        row_bytes = config.hidden_size * norm.dtype.itemsize
        self._most_rows = None if exchange is None else exchange.slot_bytes // row_bytes
        self.has_head = head is not None
        self.between_layers: Callable[[], object] | None = None  # as of the decoder
        # Of the latest pass: from these follow the parts between which that is called.
        self._layer_s = self._head_s = math.inf
        self._storage: BlockStorage | None = None
        self._slots = CacheSlots(0, 0, 0, 0, False)

    def suits(self, batch: ForwardBatch) -> bool:
        if self._most_rows is not None and len(batch.token_ids) > self._most_rows:
            return False
        if batch.pictures is not None and not batch.pictures.are_inputs_alone(self._hidden_size):
            return False
        adapters = batch.adapters
        has_kernels = adapters is None or (isinstance(adapters, AdapterRows) and adapters.is_native)
        return batch.hidden is None and has_kernels and bool(_cache_parts(batch))

    def run(
        self, hidden: Tensor, batch: ForwardBatch, storage: BlockStorage, rotations: Sequence[Rotation]
    ) -> PassTimes:
        pending, times = self._run(hidden, batch, storage, rotations)
        hidden.add_(pending)
        return times

    def logits(
        self, hidden: Tensor, batch: ForwardBatch, storage: BlockStorage, rotations: Sequence[Rotation]
    ) -> tuple[Tensor, PassTimes]:
        """Run likewise, and return the logits of every row [tokens, the rank's tokens]; `hidden` is of no use then."""
        logits = torch.empty((len(hidden), self._num_tokens), dtype=hidden.dtype)
        return logits, self._run(hidden, batch, storage, rotations, logits)[1]

    def head(self, hidden: Tensor) -> Tensor:
        logits, times = self._pass.logits(hidden.contiguous(), self._pause())
        self._head_s = times.head_s
        return logits

    def highest(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        storage: BlockStorage,
        rotations: Sequence[Rotation],
        allowed: AllowedTokens | None = None,
    ) -> tuple[HighestLogits, PassTimes]:
        """Run as `logits` does, and return the highest of every row alone: the others are nowhere kept.

        `allowed`: the tokens that it is sought among; None: all."""
        count = len(hidden)
        highest = HighestLogits(torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.float32))
        return highest, self._run(hidden, batch, storage, rotations, None, highest, allowed)[1]

    def _run(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        storage: BlockStorage,
        rotations: Sequence[Rotation],
        logits: Tensor | None = None,
        highest: HighestLogits | None = None,
        allowed: AllowedTokens | None = None,
    ) -> tuple[Tensor, PassTimes]:
        parts = _cache_parts(batch)
        assert parts, "see suits"
        adapters = batch.adapters.pass_adapters if isinstance(batch.adapters, AdapterRows) else None
        if self._storage is not storage:
            layers = range(storage.layout.num_layers)
            keys, values = [storage.key_slots(layer) for layer in layers], map(storage.value_slots, layers)
            self._storage, self._slots = storage, self._pass.slots_of(keys, list(values))
        slots, places = self._slots, self._places[batch.rings is not None]
        run = partial(self._pass.run, hidden, parts, rotations, places, slots, logits, highest, allowed, adapters)
        if batch.rings is None:
            return self._timed(run, has_head=logits is not None or highest is not None)
        batch.rings.begin(storage)
        result = self._timed(run, has_head=logits is not None or highest is not None)
        batch.rings.end(storage)
        return result

    def _timed(self, run: Callable[..., tuple[Tensor, PassTimes]], *, has_head: bool) -> tuple[Tensor, PassTimes]:
        pause = self._pause()
        if pause is None:
            return run()
        stopped = _Stopped(pause.call)
        began = time.perf_counter()
        pending, times = run(pause._replace(call=stopped.call))
        layers_s = time.perf_counter() - began - stopped.seconds - times.head_s
        self._layer_s = max(layers_s, _LEAST_S) / self._num_layers
        if has_head:
            self._head_s = times.head_s
        return pending, times

    def _pause(self) -> Pause | None:
        if self.between_layers is None:
            return None
        num_slices = max(int(min(self._head_s / _PART_S, _MOST_SLICES)), 1)
        return Pause(self.between_layers, max(int(_PART_S / self._layer_s), 1), num_slices)


def native_pass(
    config: ModelConfig,
    weights: DecoderWeights,
    placement: HeadPlacement,
    rope_of_layer: Sequence[int | None],
    ranks: DecoderRanks | None = None,
) -> NativePass | None:
    """Make the pass; None: the kernels are not built, or a part of this model has none, or what adds up over the ranks.

    `rope_of_layer`: the index of each layer's rotation; None: nothing is rotated there."""
    if ranks is not None and ranks.exchange is None:
        return None
    has_extras = config.query_multiplier != 1.0 or config.residual_multiplier != 1.0 or config.latent is not None
    has_extras |= config.temperature is not None or config.state is not None or config.has_attention_gate
    has_extras |= config.extras is not None
    is_plain = config.is_norm_first and not config.has_parallel_residual and not has_extras
    if not decode_pass_available() or not is_plain or placement.native_rows is None:
        return None
    layers = []
    for layer, layer_weights in enumerate(weights.layers):
        parts = _layer_parts(layer_weights, rope_of_layer[layer], layer in config.windowed_layers)
        if parts is None:
            return None
        layers.append(parts)
    return NativePass(layers, placement.native_rows, config, _head_parts(config, weights), ranks)


def _cache_parts(batch: ForwardBatch) -> list[CachePart]:
    if batch.rings is None:
        steps, slots = [batch.attention], [batch.slots]
    elif isinstance(batch.attention, StepOfKinds) and not batch.rings.has_chunks:
        steps, slots = list(batch.attention.steps), [batch.slots, *batch.rings.slots]
    else:
        return []
    plans = [step.decode_plan if isinstance(step, PagedStep) else None for step in steps]
    return [CachePart(plan, kind_slots) for plan, kind_slots in zip(plans, slots, strict=True) if plan is not None]


def _head_parts(config: ModelConfig, weights: DecoderWeights) -> HeadParts | None:
    norm = None if weights.final_norm is None else _native_norm(weights.final_norm)
    products = _native_parts(weights.lm_head)
    is_plain = weights.project_out is None and config.logits_divisor == 1.0 and config.logits_cap is None
    return HeadParts(norm, products) if norm is not None and products and is_plain else None


def _layer_parts(layer: LayerWeights, rope: int | None, is_windowed: bool) -> LayerParts | None:
    if not isinstance(layer.mlp, FeedForwardPart):
        return None
    norms = (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
    attention_norm, mlp_norm, *post_norms = native = [None if norm is None else _native_norm(norm) for norm in norms]
    head_norms = None if layer.head_norms is None else layer.head_norms.native_heads
    products = [_native_parts(product) for product in (layer.qkv, layer.output, *layer.mlp.products)]
    is_native = all(norm is None or native_norm is not None for norm, native_norm in zip(norms, native, strict=True))
    is_native &= layer.head_norms is None or head_norms is not None
    if not is_native or attention_norm is None or mlp_norm is None or not all(products):
        return None
    qkv, output, gate_up, down = products
    return LayerParts(attention_norm, qkv, output, mlp_norm, gate_up, down, rope, is_windowed, head_norms, *post_norms)


def _native_norm(norm: Norm) -> NormRows | None:
    return norm.native_rows if isinstance(norm, LayerNorm | RmsNorm) else None


def _native_parts(product: Projection) -> NativeParts:
    return product.native_parts if isinstance(product, NativeProduct) else ()

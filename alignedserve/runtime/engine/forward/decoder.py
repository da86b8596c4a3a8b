"""One decoder for all model families: they differ in options of ModelConfig, not in branches over names.

The frequencies by which each pair of a head's elements turns, in every scaling that families have."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alignedserve.process.heap import keep_freed_memory
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.engine.forward.forward_batch import (
    ExtraHeads,
    ForwardBatch,
    HiddenPass,
    PassState,
    Rotation,
    StateStorage,
    adapted_product,
    temperatures,
)
from alignedserve.runtime.engine.forward.native_pass import DecoderRanks, native_pass
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.decoder_parts import RopeConfig, RopeScaling
from alignedserve.runtime.model.decoder.model_config import ModelConfig, read_places
from alignedserve.runtime.model.weights.weight_loader import DecoderWeights, LayerWeights
from kernels.activation import Norm
from kernels.addend_layout import LayerProduct
from kernels.attention import ScoreForm
from kernels.cpu.decode_pass import AllowedTokens, HighestLogits, PassTimes
from kernels.feed_forward import FeedForwardPart
from kernels.lora import LayerAdapters
from kernels.rotary import HeadPlacement, rotary_angles
from kernels.streams import StreamMix


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    return _SCALINGS[rope.scaling](frequencies, rope)


def _plain(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies / rope.factor


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    wavelengths = 2.0 * math.pi / frequencies
    turns = rope.original_context_len / wavelengths
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _mixed(frequencies, share_kept.clamp(0.0, 1.0), rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keep pairs that turn often within the original context, and stretch pairs that turn seldom (YaRN, section 3.2).
    Example: theta 10 000, 64 rotated dimensions, context 4 096, beta 32 and 1: pair 10.4 turns 32 times and pair 22.5
    once, so pairs up to 10 are kept, pairs from 23 on stretched, and those between mixed."""
    first, last = _pair_of_turns(rope, rope.beta_fast), _pair_of_turns(rope, rope.beta_slow)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return _mixed(frequencies, 1.0 - ((pairs - first) / width).clamp(0.0, 1.0), rope.factor)


def _pair_of_turns(rope: RopeConfig, turns: float) -> float:
    positions_per_radian = rope.original_context_len / (turns * 2.0 * math.pi)
    return rope.rotary_dim * math.log(positions_per_radian) / (2.0 * math.log(rope.theta))


def _long(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies / torch.tensor(rope.long_divisors if rope.is_long else rope.short_divisors)


def _proportional(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    turned = frequencies / rope.factor
    turned[rope.num_turned :] = 0.0
    return turned


def _mixed(frequencies: Tensor, share_kept: Tensor, factor: float) -> Tensor:
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / factor


_SCALINGS: dict[RopeScaling, Callable[[Tensor, RopeConfig], Tensor]] = {
    RopeScaling.NONE: _plain,
    RopeScaling.LINEAR: _linear,
    RopeScaling.LLAMA3: _llama3,
    RopeScaling.YARN: _yarn,
    RopeScaling.LONG: _long,
    RopeScaling.PROPORTIONAL: _proportional,
}


class Decoder:
    """A model ready to run. Keys and values live in the storage that is passed in; a pass leaves only its times."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ranks: DecoderRanks | None = None) -> None:
        """`ranks`: the tensor-parallel group (None: one process). `weights` and `config` are this rank's shard, except
        that `config` has the whole vocabulary. Every rank makes the same passes."""
        self.config = config
        self._ranks = ranks
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._place = HeadPlacement(*heads, self.dtype, self.device, has_values=config.latent is None)
        # What attention makes of scores, for its planner.
        sinks = [layer.sinks.float() for layer in weights.layers if layer.sinks is not None]
        self.scores = ScoreForm(torch.stack(sinks) if sinks else None, config.score_cap)
        self._heads = [config.heads_of(layer) for layer in range(config.num_layers)]
        self._windowed = frozenset(config.windowed_layers)
        # Where each layer's keys and values are in the whole cache: without rings, and with them.
        self._cache_of_layer = read_places(config), read_places(config, has_rings=True)
        self._extra_heads = None if config.extras is None else ExtraHeads(config, self.dtype, self.device)
        self._first_shared = config.num_layers - (0 if config.extras is None else config.extras.num_shared)
        self._states: StateStorage | None = None  # of the latest storage
        self._between_layers: Callable[[], object] = lambda: None
        # Seconds of the latest pass in attention, of decodes and of chunks; 0 where work is only queued (a GPU).
        self.attention_s = self.chunk_attention_s = 0.0
        # The same of its products where all layers were computed in one call, else 0; and whether the head was in it.
        self.products_s, self.had_head = 0.0, False
        rope_of_layer = [config.rope_of(layer) for layer in range(config.num_layers)]
        ropes = [rope for rope in dict.fromkeys(rope_of_layer) if rope is not None]
        self._ropes = [(inverse_frequencies(rope).to(self.device), rope.angle_factor) for rope in ropes]
        self._rope_of_layer = [None if rope is None else ropes.index(rope) for rope in rope_of_layer]
        axes = () if config.rope is None else config.rope.axes
        self._axes = torch.tensor(axes, device=self.device) if axes else None
        self._native_pass = native_pass(config, weights, self._place, self._rope_of_layer, ranks)
        # Rounded to the dtype of the weights, as the embeddings are.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        if self.device.type == "cpu":
            keep_freed_memory()

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def logits_width(self) -> int:
        """The columns of `logits`: the vocabulary, but on ranks other than the first none."""
        return self.config.vocab_size if self._ranks is None or self._ranks.rank == 0 else 0

    def stop_for(self, between_layers: Callable[[], object]) -> None:
        """Call this between layers, and slices of the head, of passes: another one may begin and end there."""
        self._between_layers = between_layers
        if self._native_pass is not None:
            self._native_pass.between_layers = between_layers

    def give_way(self) -> None:
        measured = (self.attention_s, self.chunk_attention_s, self.products_s, self.had_head)
        self._between_layers()
        self.attention_s, self.chunk_attention_s, self.products_s, self.had_head = measured

    @property
    def has_native_head(self) -> bool:
        return self._native_pass is not None and self._native_pass.has_head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: BlockStorage) -> Tensor:
        """Write the keys and values of all tokens of the batch; return their last hidden vectors [tokens, hidden_size].
        The result is what `logits` takes: the final norm is not yet applied, since few rows need it. With `batch.last`
        it has the hidden vectors of these rows alone, in their order."""
        return self.through_layers(self._embed(batch), batch, storage)

    def through_layers(self, hidden: Tensor, batch: ForwardBatch, storage: BlockStorage) -> Tensor:
        """Do as `forward` does, in inference mode, with inputs of layer 0 [tokens, hidden_size], changed in place."""
        if len(batch.fresh_blocks):
            storage.zero_blocks(batch.fresh_blocks)
        for block_id, first_slot in batch.unclean_tails:
            storage.zero_tail(block_id, first_slot)
        rotations = self._rotations(batch.rotated_at)
        if self._native_pass is not None and self._native_pass.suits(batch):
            self._note(self._native_pass.run(hidden, batch, storage, rotations), has_head=False)
            return hidden
        run = PassState(batch, storage, self._by_layer(rotations), self._cache_of_layer[batch.rings is not None])
        run.begin(None if batch.states is None else self._states_of(storage))
        if self.config.temperature is not None:
            run.temperatures = temperatures(batch.positions, self.config.temperature).to(self.dtype)
        if batch.hidden is not None:
            hidden_rotations = self._by_layer(self._rotations(batch.hidden.positions))
            run.hidden = HiddenPass(batch.hidden, storage, self._place, hidden_rotations)
        if self._weights.layer_embeddings is not None:
            run.layer_embeddings = self._weights.layer_embeddings(self._worded(batch), hidden)
        ends = self._weights.stream_ends
        hidden, pending = hidden if ends is None else ends.widened(hidden), None
        for layer, weights in enumerate(self._weights.layers):
            if batch.last is not None and layer == min(self._first_shared, self.config.num_layers - 1):
                run.last = batch.last
                if not len(run.last.token_rows):
                    if layer < self._first_shared:
                        self._fill_cache(self._inputs(hidden, pending, weights), layer, weights, run)
                    hidden, pending = hidden[:0], None
                    break
                if layer == self._first_shared:  # from here on nothing is written for later tokens
                    assert pending is None, "a layer that leaves its end to the next"
                    hidden = run.cut(hidden, run.last)
            hidden, pending = self._run_layer(hidden, pending, layer, weights, run)
            if batch.pictures is not None and run.last is None:  # it is behind the first layers that something is added
                batch.pictures.add_behind(layer, hidden)
            self._between_layers()
        run.end()
        if self.device.type == "cpu":
            self.attention_s, self.chunk_attention_s = run.attention_s, run.chunk_attention_s
            self.products_s, self.had_head = 0.0, False
        if ends is not None:
            return ends.narrowed(hidden) if len(hidden) else hidden[:, 0]
        return hidden if pending is None else hidden.add_(pending)

    @torch.inference_mode()
    def decode(self, batch: ForwardBatch, storage: BlockStorage) -> Tensor | None:
        """Compute a batch of decodes as `forward` does, and return the logits of all its rows [tokens, vocab_size].
        None: not in one call; nothing has changed then."""
        native = self._native_pass
        if native is None or not native.has_head or not native.suits(batch):
            return None
        logits, times = native.logits(self._embed(batch), batch, storage, self._rotations(batch.rotated_at))
        self._note(times, has_head=True)
        return logits if self._ranks is None else self._ranks.gather_logits(logits)

    @torch.inference_mode()
    def decode_highest(
        self, batch: ForwardBatch, storage: BlockStorage, allowed: AllowedTokens | None = None
    ) -> HighestLogits | None:
        """Compute a batch of decodes as `decode` does, and return the highest logit of each row alone.

        `allowed`: the tokens that it is sought among; None: all."""
        native = self._native_pass
        if native is None or not native.has_head or not native.suits(batch):
            return None
        highest, times = native.highest(self._embed(batch), batch, storage, self._rotations(batch.rotated_at), allowed)
        self._note(times, has_head=True)
        return highest if self._ranks is None else self._ranks.gather_highest(highest)

    def _note(self, times: PassTimes, *, has_head: bool) -> None:
        self.attention_s, self.chunk_attention_s = times.attention_s, 0.0
        self.products_s, self.had_head = times.products_s + times.head_s, has_head

    @torch.inference_mode()
    def outputs(self, hidden: Tensor) -> Tensor:
        """Compute hidden [rows, hidden_size] -> what the model's head takes [rows, output width]: embeddings."""
        weights = self._weights
        if weights.final_norm is not None:
            hidden = weights.final_norm(hidden)
        return hidden if weights.project_out is None else weights.project_out(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [rows, hidden_size], rows >= 1 -> logits [rows, logits_width], dtype of the weights."""
        native = self._native_pass
        if native is not None and native.has_head:
            logits = native.head(hidden)
        else:
            logits = self._weights.lm_head(self.outputs(hidden))
        if self._ranks is not None:
            logits = self._ranks.gather_logits(logits)
        if self.config.logits_divisor != 1.0:
            logits = logits.div_(self.config.logits_divisor)
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def finish_step(self) -> None:
        """Wait, on a CPU, until every rank has written what the step writes: others may read all ranks' blocks then."""
        if self._ranks is not None and self.device.type == "cpu":
            self._ranks.wait_for_all()

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        dtype = self._place.angle_dtype
        if positions.ndim == 2:  # along axes, of which each pair has one
            assert self._axes is not None, "a model whose positions have one axis"
            positions = positions.index_select(1, self._axes)[:, None]
        return [rotary_angles(positions, frequencies, dtype, factor) for frequencies, factor in self._ropes]

    def _by_layer(self, rotations: Sequence[Rotation]) -> Sequence[Rotation | None]:
        return [None if rope is None else rotations[rope] for rope in self._rope_of_layer]

    def _embed(self, batch: ForwardBatch) -> Tensor:
        weights = self._weights
        if self._ranks is None:
            hidden = weights.embedding.index_select(0, batch.token_ids)
        else:
            hidden = self._ranks.embed(weights.embedding, batch.token_ids)
        if self._embedding_multiplier != 1.0:
            hidden = hidden.mul_(self._embedding_multiplier)
        if batch.pictures is not None:
            hidden = batch.pictures.put_into(hidden)
        if weights.project_in is not None:
            hidden = weights.project_in(hidden)
        if weights.positions is not None:
            hidden = hidden + weights.positions.index_select(0, batch.positions + self.config.position_offset)
        return hidden

    def _worded(self, batch: ForwardBatch) -> Tensor:
        if batch.pictures is None or self.config.extras is None:
            return batch.token_ids
        return batch.token_ids.index_fill(0, batch.pictures.rows, self.config.extras.picture_token)

    def _run_layer(
        self, hidden: Tensor, pending: Tensor | None, layer: int, weights: LayerWeights, run: PassState
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer; return the residual stream, updated in place, and what the next norm adds to it. Both [tokens,
        hidden_size]."""
        if weights.streams is not None:
            return self._run_streams(hidden, layer, weights, weights.streams, run), None
        config = self.config
        if not config.is_norm_first:
            if run.hidden is not None:
                run.hidden.recompute(hidden, layer, weights, is_norm_first=False)
            attended = self._attention(hidden, layer, weights, run)
            hidden = weights.attention_norm.after_adding_(run.kept(hidden), attended)
            return weights.mlp_norm.after_adding_(hidden, self._mlp(hidden, layer, weights, run)), None
        normed = self._inputs(hidden, pending, weights)
        if run.hidden is not None:
            run.hidden.recompute(hidden, layer, weights, is_norm_first=True)
        attended = self._attention(normed, layer, weights, run)
        hidden = run.kept(hidden)
        if weights.mlp is None:
            return hidden, attended
        if config.has_parallel_residual:
            return hidden, self._mlp(weights.mlp_norm(hidden), layer, weights, run).add_(attended)
        normed = weights.mlp_norm.after_adding_(hidden, attended)
        added = self._mlp(normed, layer, weights, run, hidden)
        if weights.end is None:
            return hidden, added
        return weights.end(hidden.add_(added), run.embeddings_of(layer)), None

    def _run_streams(
        self, streams: Tensor, layer: int, weights: LayerWeights, mix: StreamMix, run: PassState
    ) -> Tensor:
        predicted = mix.predicted(streams)
        first = predicted[:, 0].contiguous()
        normed = weights.attention_norm(first)
        attended = self._attention(normed, layer, weights, run)
        predicted, first, normed = run.kept(predicted), run.kept(first), run.kept(normed)
        hidden = (first + attended).add_(mix.laurel(normed)).div_(math.sqrt(2.0))
        hidden = hidden + self._mlp(weights.mlp_norm(hidden), layer, weights, run)
        corrected, embeddings = mix.corrected(predicted, hidden), run.embeddings_of(layer)
        assert weights.end is not None, "streams without layer embeddings"
        corrected[:, 1:] += weights.end.addend(mix.scaled(corrected), embeddings)[:, None]
        return corrected

    def _inputs(self, hidden: Tensor, pending: Tensor | None, weights: LayerWeights) -> Tensor:
        norm = weights.attention_norm
        if not self.config.is_norm_first:
            return hidden
        if weights.streams is not None:
            hidden = weights.streams.predicted(hidden)[:, 0].contiguous()
        return norm(hidden) if pending is None else norm.after_adding_(hidden, pending)

    def _mlp(
        self, x: Tensor, layer: int, weights: LayerWeights, run: PassState, residual: Tensor | None = None
    ) -> Tensor:
        mlp, adapters = weights.mlp, run.kept_adapters()
        assert mlp is not None, f"layer {layer} has no feed-forward part"
        if adapters is not None and isinstance(mlp, FeedForwardPart):  # experts have no adapters
            return self._addend(mlp.adapted(x, LayerAdapters(adapters, layer)), weights.mlp_post_norm)
        product = mlp(x)
        if weights.beside is not None:
            assert residual is not None, "experts without the stream"
            product = weights.beside(product, residual)
        return self._addend(product, weights.mlp_post_norm)

    def _addend(self, product: Tensor, post_norm: Norm | None) -> Tensor:
        if self._ranks is not None:
            product = self._ranks.add_up(product)
        if post_norm is not None:
            product = post_norm(product)
        multiplier = self.config.residual_multiplier
        return product if multiplier == 1.0 else product.mul_(multiplier)

    def _project(self, x: Tensor, layer: int, weights: LayerWeights, run: PassState) -> tuple[Tensor, Tensor, Tensor]:
        config, batch, storage = self.config, run.batch, run.storage
        rotation, cache = run.rotations[layer], run.cache_of_layer[layer]
        fused = adapted_product(LayerProduct.QKV, layer, weights.qkv, x, batch.adapters)
        if self._extra_heads is not None:
            return self._extra_heads.placed(fused, weights.head_norms, layer, run)
        query_width, kv_width = config.query_width, config.kv_width
        if config.has_attention_gate:
            fused, run.gates = fused.split_with_sizes((query_width + 2 * kv_width, query_width), dim=1)
        if config.mixes_beside:
            fused, run.mixer_inputs = fused.split_with_sizes(
                (query_width + 2 * kv_width, fused.shape[1] - query_width - 2 * kv_width), dim=1
            )
        queries = fused[:, :query_width]
        if run.hidden is None:
            index, slots = run.cache_rows(cache)
            cached = (storage.key_slots(index), storage.value_slots(index))
            self._place(fused, weights.head_norms, rotation, slots, *cached)
        else:
            run.hidden.place(fused, layer, weights, rotation, batch.slots)
        if config.query_multiplier != 1.0:
            queries.mul_(config.query_multiplier)
        if run.temperatures is not None and self._rope_of_layer[layer] is None:
            queries.mul_(run.temperatures)
        return queries, fused[:, query_width : query_width + kv_width], fused[:, -kv_width:]  # latents are both

    def _fill_cache(self, x: Tensor, layer: int, weights: LayerWeights, run: PassState) -> None:
        attends = weights.mixer is None or weights.mixer_output is not None
        if attends:
            self._project(x, layer, weights, run)
            run.settle_rings(run.cache_of_layer[layer])
        if weights.mixer is not None:
            self._mix(run.mixer_inputs if attends else weights.qkv(x), layer, weights, run)

    def _mix(self, projected: Tensor, layer: int, weights: LayerWeights, run: PassState) -> Tensor:
        states, rows = run.states, run.batch.states
        assert weights.mixer is not None, f"layer {layer} has no state"
        assert states is not None, "a batch without states"
        assert rows is not None, "a batch without states"
        return weights.mixer(projected, rows.at(states.column(layer)), states.parts(layer))

    def _states_of(self, storage: BlockStorage) -> StateStorage:
        if self._states is None or self._states.storage is not storage:
            self._states = StateStorage(self.config, storage)
        return self._states

    def _attention(self, x: Tensor, layer: int, weights: LayerWeights, run: PassState) -> Tensor:
        if weights.mixer is not None and weights.mixer_output is None:
            mixed = run.kept(self._mix(weights.qkv(x), layer, weights, run))
            return self._addend(weights.output(mixed), weights.attention_post_norm)
        config, cache = self.config, run.cache_of_layer[layer]
        queries, keys, values = self._project(x, layer, weights, run)
        queries, heads = run.kept(queries), self._heads[layer]
        queries = queries.view(len(queries), heads.num_kv_heads, config.num_heads // heads.num_kv_heads, heads.head_dim)
        attended = torch.empty(queries.shape, dtype=x.dtype, device=x.device)
        is_windowed = layer in self._windowed
        attention = run.attention if run.last is None else run.last.attention
        started = time.perf_counter()
        attention.decode(queries, attended, cache, is_windowed)
        decoded = time.perf_counter()
        run.attention_s += decoded - started
        attention.chunks(queries, (keys, values), attended, cache, is_windowed)
        run.chunk_attention_s += time.perf_counter() - decoded
        run.settle_rings(cache)
        attended = attended.flatten(1)
        if run.gates is not None:  # in float64, which rounds alike wherever an element stands
            attended.mul_(run.kept(run.gates).double().sigmoid_())
        output = adapted_product(LayerProduct.OUTPUT, layer, weights.output, attended, run.kept_adapters())
        if weights.mixer_output is not None:
            output = output.add_(weights.mixer_output(run.kept(self._mix(run.mixer_inputs, layer, weights, run))))
        return self._addend(output, weights.attention_post_norm)

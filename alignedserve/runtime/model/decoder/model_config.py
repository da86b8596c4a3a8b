"""The configuration of a decoder: sizes and options, without torch, so that gateway and CLI can read it too.

`read_model_config` (model_files.py) makes one from a Hugging Face folder; benchmarks write one by hand."""

from dataclasses import dataclass, replace

from alignedserve.core.block_layout import DTYPE_BYTES, BlockLayout, LayerHeads
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.runtime.model.decoder.decoder_parts import (
    Activation,
    CheckpointQuantization,
    ExpertConfig,
    HeadNormKind,
    HeadSizes,
    LatentConfig,
    LayerExtras,
    NormKind,
    ProductMultipliers,
    RopeConfig,
    RopeScaling,
    TemperatureConfig,
)
from alignedserve.runtime.model.decoder.state_config import HEADER_BYTES, StateConfig, state_bytes


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. All sizes are positive and consistent (the reader checks them)."""

    family: str  # a key of families.table.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    activation: Activation
    norm: NormKind
    norm_eps: float
    embedding_size: int  # differs from hidden_size where embeddings are projected in and out
    dtype: str  # the dtype of the files, a key of DTYPE_BYTES
    rope: RopeConfig | None = None  # None: learned positions
    position_offset: int = 0  # learned positions start at this row of their table
    windowed_rope: RopeConfig | None = None  # of windowed layers; None: the same as of the others
    sliding_window: int | None = None  # a windowed layer reads this many last tokens, its own included
    windowed_layers: tuple[int, ...] = ()
    has_chunked_windows: bool = False  # a token reads those since the last multiple of the window instead
    unrotated_layers: tuple[int, ...] = ()
    temperature: TemperatureConfig | None = None  # of queries of unrotated layers; None: 1
    is_gated: bool = True  # activation(gate) * up rather than activation(up)
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    head_norm: HeadNormKind = HeadNormKind.NONE
    is_norm_first: bool = True
    has_input_norms: bool = True  # False: the parts of a layer read the residual stream as it is
    has_post_norms: bool = False  # what a part of a layer adds to the residual stream is normalised as well
    has_final_norm: bool = True
    has_parallel_residual: bool = False
    has_one_input_norm: bool = False  # both parts of a layer read the same normalised inputs
    ties_embeddings: bool = False
    experts: ExpertConfig | None = None
    embedding_multiplier: float = 1.0
    latent: LatentConfig | None = None  # then there is one key head, and head_dim is its row's width
    state: StateConfig | None = None  # of the layers below, which keep a state in place of keys and values
    state_layers: tuple[int, ...] = ()
    mixes_beside: bool = False  # these layers attend as well, with the same inputs, and both add to the stream
    multipliers: ProductMultipliers | None = None  # None: all are 1
    bare_layers: tuple[int, ...] = ()  # without a feed-forward part
    parts_in_files: tuple[tuple[int, int], ...] = ()  # numbers of both parts of each layer, if files have them apart
    has_attention_gate: bool = False  # what each head has gathered is multiplied with a sigmoid of the inputs
    has_sinks: bool = False  # each head weighs nothing, by a learned score, beside its keys
    extras: LayerExtras | None = None
    score_cap: float | None = None  # c: scores of attention become c * tanh(score / c)
    logits_cap: float | None = None  # likewise
    query_multiplier: float = 1.0  # beside the 1 / sqrt(head_dim) of every model
    residual_multiplier: float = 1.0  # of what a part of a layer adds to the residual stream
    logits_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    stored_quantization: CheckpointQuantization | None = None  # of the files; None: they hold floats

    def for_context(self, max_context_len: int) -> "ModelConfig":
        """Return the config for contexts up to this length, on which LongRoPE's choice of divisors depends."""
        if self.rope is None or self.rope.scaling is not RopeScaling.LONG:
            return self
        is_long = max_context_len > self.rope.original_context_len
        return replace(self, rope=replace(self.rope, is_long=is_long))

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary position embedding of a layer; None: it has none."""
        if layer in self.unrotated_layers:
            return None
        return self.windowed_rope if self.windowed_rope and layer in self.windowed_layers else self.rope

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """Return the experts of a layer; None: it has a feed-forward part."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def attention_layers(self) -> tuple[int, ...]:
        if self.mixes_beside:
            return tuple(range(self.num_layers))
        return tuple(layer for layer in range(self.num_layers) if layer not in self.state_layers)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Return the layers with keys and values of their own in the cache, in order."""
        num_own = self.num_layers - (0 if self.extras is None else self.extras.num_shared)
        return tuple(layer for layer in self.attention_layers if layer < num_own)

    def heads_of(self, layer: int) -> HeadSizes:
        if self.extras is None:
            return HeadSizes(self.num_kv_heads, self.head_dim)
        return self.extras.heads(is_windowed=layer in self.windowed_layers)

    @property
    def cache_kinds(self) -> dict[HeadSizes, tuple[int, ...]]:
        """Return the cached layers by the sizes of their heads, kinds and layers in the order of the cache."""
        kinds: dict[HeadSizes, tuple[int, ...]] = {HeadSizes(self.num_kv_heads, self.head_dim): ()}  # the first
        for layer in self.cached_layers:
            heads = self.heads_of(layer)
            kinds[heads] = (*kinds.get(heads, ()), layer)
        return {sizes: layers for sizes, layers in kinds.items() if layers}

    def state_bytes(self, dtype: str) -> int:
        if self.state is None:
            return 0
        return HEADER_BYTES + len(self.state_layers) * state_bytes(self.state, dtype)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_parts(self) -> int:
        """Return the rows that are cached of a token on one layer: a key and a value, or a latent that is both."""
        return 2 if self.latent is None else 1

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        layers = self.num_layers * self._layer_parameters - self._num_expert_layers * self._mlp_parameters
        layers += self._num_expert_layers * self._expert_parameters(None)
        layers -= len(self.bare_layers) * (self._mlp_parameters + self._norm_parameters)
        return layers + self._state_parameters + self._extra_parameters + self._outer_parameters

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype]

    @property
    def num_projected(self) -> int:
        """Return the number of weights of linear layers, all experts, and language-model head."""
        num_looked_up = 0 if self.ties_embeddings else self.vocab_size * self.embedding_size
        num_looked_up += 0 if self.extras is None else self.extras.looked_up_parameters(self.num_layers)
        if self.rope is None:
            num_looked_up += (self.position_offset + self.max_position_embeddings) * self.hidden_size
        return self.num_parameters - num_looked_up

    @property
    def num_multiplied(self) -> int:
        """Return the number of weights that one token is multiplied with: only its own experts count."""
        if self.experts is None:
            return self.num_projected
        all_experts, chosen = self._expert_parameters(None), self._expert_parameters(self.experts.num_chosen)
        return self.num_projected - self._num_expert_layers * (all_experts - chosen)

    def loaded_weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Return the bytes of all weights in memory; a packed head needs a plain embedding beside it, even a tied
        one."""
        num_routing = self._num_expert_layers * self._router_parameters  # float32 whatever the others are
        num_projected = self.num_projected - num_routing
        num_plain = self.num_parameters - self.num_projected
        if self.ties_embeddings:
            num_plain += self.vocab_size * self.embedding_size
        projected_bytes = 1 if quantization == "int8" else DTYPE_BYTES[dtype]
        weights = num_plain * DTYPE_BYTES[dtype] + num_projected * projected_bytes
        return weights + num_routing * DTYPE_BYTES["float32"]

    def kv_token_bytes(self, dtype: str) -> int:
        width = sum(len(layers) * sizes.num_kv_heads * sizes.head_dim for sizes, layers in self.cache_kinds.items())
        return self.kv_parts * width * DTYPE_BYTES[dtype]

    def hidden_block_tokens(self, block_size: int) -> int | None:
        """Return the tokens whose layer inputs fill a block; None: at most `block_size`, or with a remainder."""
        if self.state is not None or self.extras is not None:  # whose layers have none
            return None
        tokens, rest = divmod(self.kv_parts * block_size * self.kv_width, self.hidden_size)
        return tokens if not rest and tokens > block_size else None

    def block_layout(self, block_size: int, dtype: str) -> BlockLayout:
        return BlockLayout(
            block_size=block_size,
            num_layers=len(self.cached_layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            num_parts=self.kv_parts,
            state_bytes=self.state_bytes(dtype),
            unlike=self._unlike,
        )

    def layouts(self, block_size: int, dtype: str) -> tuple[BlockLayout, ...]:
        whole = self.block_layout(block_size, dtype)
        return (whole, self.layout_apart(whole), *([self.layout_of_rings(whole)] if self.may_have_rings else []))

    def layout_apart(self, layout: BlockLayout) -> BlockLayout:
        """Return the layout with states in blocks of their own; unchanged where a layer's state is larger than one."""
        layer_bytes = 0 if self.state is None else state_bytes(self.state, layout.dtype)
        return layout.with_own_states(len(self.state_layers), layer_bytes)

    @property
    def may_have_rings(self) -> bool:
        """Return whether layers with a window can keep no more than it, in rings: see BlockLayout.with_rings."""
        num_windowed = len(set(self.windowed_layers) & set(self.cached_layers))
        is_mixed = 0 < num_windowed < len(self.cached_layers)
        return is_mixed and self.state is None and self.extras is None and self.latent is None

    def layout_of_rings(self, layout: BlockLayout) -> BlockLayout:
        assert self.sliding_window is not None, "a model without windows"
        return layout.with_rings(len(self.windowed_layers), self.sliding_window)

    def shape(self, name: str, dtype: str) -> ModelShape:
        """Return the sizes for cost models; embeddings count as wide as the hidden state."""
        return ModelShape(
            name=name,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self._mean_inner_size,
            vocab_size=self.vocab_size,
            is_gated=self.is_gated,
            ties_embeddings=self.ties_embeddings,
            num_positions=0 if self.rope else self.max_position_embeddings + self.position_offset,
            dtype=dtype,
            num_experts=0 if self.experts is None else self.experts.num_experts,
            num_chosen_experts=0 if self.experts is None else self.experts.num_chosen,
            expert_size=0 if self.experts is None else self.experts.intermediate_size,
            num_expert_layers=self._num_expert_layers,
            shared_expert_size=0 if self.experts is None else self.experts.shared_size,
            kv_parts=self.kv_parts,
            attention_parameters=self._mean_attention_parameters,
            num_cached_layers=0 if self.state is None and self.extras is None else len(self.cached_layers),
            num_state_layers=len(self.state_layers),
            state_layer_bytes=0 if self.state is None else state_bytes(self.state, dtype),
            unlike=self._unlike,
            num_windowed_layers=len(self.windowed_layers) if self.may_have_rings else 0,
            window=(self.sliding_window or 0) if self.may_have_rings else 0,
        )

    @property
    def _unlike(self) -> tuple[LayerHeads, ...]:
        kinds = [LayerHeads(len(layers), *sizes) for sizes, layers in self.cache_kinds.items()]
        return tuple(kinds[1:])

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm in (NormKind.LAYER, NormKind.LAYER_PLUS_ONE) else 1)

    @property
    def _layer_parameters(self) -> int:
        return self._attention_parameters + self._mlp_parameters + self._num_layer_norms * self._norm_parameters

    @property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        gates = self.query_width * self.has_attention_gate
        attention = self.hidden_size * (2 * (self.query_width + self.kv_width) + gates) + gates * self.has_qkv_bias
        attention += (self.query_width + 2 * self.kv_width) * self.has_qkv_bias + self.num_heads * self.has_sinks
        return attention + self.hidden_size * self.has_output_bias + self._head_norm_parameters

    @property
    def _mean_attention_parameters(self) -> int:
        if self.extras is not None:
            return self._extra_attention // self.num_layers + self._attention_parameters
        if self.state is None and self.latent is None:
            return 0
        return self._attention_parameters + self._state_parameters // self.num_layers

    @property
    def _state_parameters(self) -> int:
        if self.state is None:
            return 0
        replaced = 0 if self.mixes_beside else self._attention_parameters
        return len(self.state_layers) * (self.state.parameters(self.hidden_size) - replaced)

    @property
    def _extra_attention(self) -> int:
        if self.extras is None:
            return 0
        sizes = (self.hidden_size, self.num_heads, self.num_layers)
        parameters = self.extras.attention_parameters(*sizes, self.windowed_layers)
        return parameters - self.num_layers * self._attention_parameters

    @property
    def _extra_parameters(self) -> int:
        if self.extras is None:
            return 0
        sizes = self.extras.inner_sizes
        wider = (3 * self.hidden_size * (sum(sizes) - self.num_layers * self.intermediate_size)) if sizes else 0
        beside = 0
        if self.experts is not None and self.experts.is_beside:
            beside = self._mlp_parameters + 4 * self.hidden_size + self.experts.num_experts
        others = self.extras.other_parameters(self.hidden_size, self.num_layers)
        return self._extra_attention + wider + self._num_expert_layers * beside + others

    @property
    def _head_norm_parameters(self) -> int:
        if self.head_norm in (HeadNormKind.NONE, HeadNormKind.UNSCALED):
            return 0
        return self.query_width + self.kv_width if self.head_norm is HeadNormKind.WHOLE else 2 * self.head_dim

    @property
    def _num_layer_norms(self) -> int:
        inputs = (1 if self.has_one_input_norm else 2) if self.has_input_norms else 0
        return inputs + (2 if self.has_post_norms else 0)

    @property
    def _mlp_parameters(self) -> int:
        num_up = 2 if self.is_gated else 1
        biases = (num_up * self.intermediate_size + self.hidden_size) * self.has_mlp_bias
        return (num_up + 1) * self.hidden_size * self.intermediate_size + biases

    @property
    def _mean_inner_size(self) -> int:
        sizes = () if self.extras is None else self.extras.inner_sizes
        return sum(sizes) // len(sizes) if sizes else self.intermediate_size

    @property
    def _num_expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def _router_parameters(self) -> int:
        return 0 if self.experts is None else self.experts.num_experts * self.hidden_size

    def _expert_parameters(self, count: int | None) -> int:
        if self.experts is None:
            return 0
        count = self.experts.num_experts if count is None else count
        num_matrices = 3 if self.is_gated else 2
        shared = self.hidden_size * (num_matrices * self.experts.shared_size + self.experts.has_shared_gate)
        inner = self.experts.intermediate_size
        biases = (self.experts.num_experts + count * (2 * inner + self.hidden_size)) * self.experts.has_bias
        return self._router_parameters + shared + num_matrices * count * self.hidden_size * inner + biases

    @property
    def _outer_parameters(self) -> int:
        embeddings = self.vocab_size * self.embedding_size * (1 if self.ties_embeddings else 2)
        positions = 0
        if self.rope is None:
            positions = (self.max_position_embeddings + self.position_offset) * self.hidden_size
        projections = 0
        if self.embedding_size != self.hidden_size:
            projections = 2 * self.embedding_size * self.hidden_size
        return embeddings + positions + projections + self._norm_parameters * self.has_final_norm


def inner_size(config: ModelConfig, layer: int) -> int:
    sizes = () if config.extras is None else config.extras.inner_sizes
    return sizes[layer] if sizes else config.intermediate_size


def cache_source(config: ModelConfig, layer: int) -> int:
    """Return the layer whose keys and values a layer reads: its own, or those of the last before it of its kind."""
    cached = config.cached_layers
    if layer in cached:
        return layer
    is_windowed = layer in config.windowed_layers
    return max(source for source in cached if (source in config.windowed_layers) is is_windowed)


def cached_places(config: ModelConfig) -> dict[int, tuple[int, int]]:
    """Return the kind of each cached layer, and its place within the kind."""
    kinds = enumerate(config.cache_kinds.values())
    return {layer: (kind, index) for kind, layers in kinds for index, layer in enumerate(layers)}


def read_places(config: ModelConfig, *, has_rings: bool = False) -> dict[int, int]:
    """Return, by attending layer, the place of its keys and values in the whole cache. `has_rings`: windowed layers
    come last."""
    ordered = list(cached_places(config))
    if has_rings:
        ordered.sort(key=lambda layer: layer in config.windowed_layers)
    places = {layer: index for index, layer in enumerate(ordered)}
    return {layer: places[cache_source(config, layer)] for layer in config.attention_layers}

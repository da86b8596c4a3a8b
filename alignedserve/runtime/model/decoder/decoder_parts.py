"""Kinds and sizes of the parts of a decoder: norms, experts, rotation, latent attention; without torch."""

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple


class NormKind(enum.Enum):
    """The normalisation of a layer's input."""

    LAYER = "layer"  # subtract the mean, divide by the deviation, scale and shift
    RMS = "rms"  # divide by the root mean square, scale
    RMS_PLUS_ONE = "rms_plus_one"  # the same, scaled by 1 + weight
    UNSHIFTED_LAYER = "unshifted_layer"  # as LAYER, without a shift
    LAYER_PLUS_ONE = "layer_plus_one"  # as LAYER, scaled by 1 + weight


class HeadNormKind(enum.Enum):
    """The normalisation of queries and keys, by their root mean squares."""

    NONE = "none"
    HEADS = "heads"  # of each head, before it is rotated
    ROTATED_HEADS = "rotated_heads"  # of each head, after it is rotated
    WHOLE = "whole"  # of all heads of a token together
    UNSCALED = "unscaled"  # as ROTATED_HEADS, without weights; of unrotated layers none


class Activation(enum.Enum):
    """Nonlinearity of the feed-forward part."""

    RELU = "relu"
    RELU2 = "relu2"  # its square
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SILU = "clamped_silu"  # gpt-oss's gates and ups, cut at 7


class Scoring(enum.Enum):
    """How a router makes shares of its logits."""

    SOFTMAX = "softmax"  # of all experts
    SIGMOID = "sigmoid"  # of each alone; a learned number is added for the choice, and not to the share


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of the feed-forward part: each token passes the few that a router chooses."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalises: bool  # the shares of the chosen experts add up to 1
    dense_layers: tuple[int, ...] = ()  # those with a feed-forward part after all
    scoring: Scoring = Scoring.SOFTMAX
    num_groups: int = 1  # of experts; this and the two below: SIGMOID only
    num_chosen_groups: int = 1  # from which a token's experts are
    scale: float = 1.0  # multiplies all shares
    shared_size: int = 0  # intermediate size of the expert that every token passes; 0: there is none
    has_shared_gate: bool = False  # each token has a share of that one
    has_bias: bool = False  # of the router and both products
    scales_inputs: bool = False  # shares multiply what experts read, not what they give
    is_beside: bool = False  # the feed-forward part is there as well, and both have norms of their own


@dataclass(frozen=True, slots=True)
class TemperatureConfig:
    """The factor of a query at position p: 1 + scale * log(1 + floor((p + 1) / step))."""

    step: float
    scale: float


class RopeScaling(enum.Enum):
    """The scaling of rotary frequencies beyond the trained context."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONG = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    rotary_dim: int = 0  # leading dimensions of each head that are rotated
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: LLAMA3 only
    high_freq_factor: float = 4.0
    original_context_len: int = 8192  # the context of training: all but LINEAR
    beta_fast: float = 32.0  # this and the two below: YARN only
    beta_slow: float = 1.0
    has_whole_bounds: bool = True  # the first and last interpolated pair are rounded outwards
    short_divisors: tuple[float, ...] = ()  # this and the next, one per rotated pair: LONG only
    long_divisors: tuple[float, ...] = ()  # for contexts beyond the original one
    is_long: bool = False  # the context that is served is beyond the original one
    angle_factor: float = 1.0  # multiplies cosines and sines
    axes: tuple[int, ...] = ()  # of each rotated pair: 0: by time, 1: by row, 2: by column; empty: all are one
    frequency_factors: tuple[float, ...] = ()  # divisors of the frequencies, one each, where a file has its own
    num_turned: int = 0  # pairs of each head, the first ones, the others stay as they are: PROPORTIONAL only


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2.1): a token's keys and values are made of one short row, its latent.
    The cache has the row alone, behind a key that is rotated and that all heads share. Queries are multiplied with what
    would make keys of latents, and the sum of latents with what would make values: one key head of `rope_dim + rank`
    elements, whose values are the keys."""

    rank: int  # elements of a latent
    rope_dim: int  # of the key beside it
    nope_dim: int  # elements of a head's key that are not rotated
    value_dim: int  # of a head
    query_rank: int | None = None  # queries are made of a short row too; None: of the layer's inputs

    @property
    def row_width(self) -> int:
        return self.rope_dim + self.rank

    @property
    def query_dim(self) -> int:
        return self.rope_dim + self.nope_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        queries = num_heads * self.query_dim
        made = hidden_size * queries
        if self.query_rank is not None:
            made = self.query_rank * (hidden_size + 1 + queries)
        cached = hidden_size * self.row_width + self.rank
        heads = num_heads * (self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size)
        return made + cached + heads


class HeadSizes(NamedTuple):
    """The keys and values of one token on one layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerExtras:
    """Parts of Gemma 3n and 4: values normalised without weights, and scores not divided by a root of the width. The
    last layers read the keys and values of the last layer of their kind that has some. Layer embeddings: a short vector
    of the token, multiplied with a gate made of the stream, is added behind each layer. Streams (AltUp, Baykal et al.,
    2023): a layer computes one residual stream, and predicts and corrects the others; beside its attention is a short
    product (LAuReL)."""

    windowed_heads: HeadSizes
    full_heads: HeadSizes
    num_shared: int = 0  # last layers without keys and values
    repeats_keys: bool = False  # on layers without a window values are made of the keys' product
    inner_sizes: tuple[int, ...] = ()  # of the feed-forward part of each layer; empty: they are all alike
    sparsities: tuple[float, ...] = ()  # of each layer: the share of gates below which they count as 0; empty: none
    embedding_width: int = 0  # of layer embeddings; 0: there are none
    embedding_vocab: int = 0  # tokens that have some; others have those of token 0
    picture_token: int = 0  # whose layer embeddings pictures have
    pictures_in_windows: bool = False  # tokens of a picture read one another in layers with a window
    num_streams: int = 1
    laurel_rank: int = 0  # this and the next: of models with several streams
    scales_corrected: bool = False
    has_scales: bool = False  # a number by which the stream is multiplied behind each layer

    @property
    def title(self) -> str:
        return "layer embeddings, shared keys or several streams (Gemma 3n and 4)"

    def heads(self, *, is_windowed: bool) -> HeadSizes:
        return self.windowed_heads if is_windowed else self.full_heads

    def attention_parameters(self, width: int, num_heads: int, num_layers: int, windowed: Collection[int]) -> int:
        total = 0
        for layer in range(num_layers):
            is_windowed = layer in windowed
            kv_heads, head_dim = self.heads(is_windowed=is_windowed)
            total += 2 * width * num_heads * head_dim + head_dim
            if layer < num_layers - self.num_shared:
                num_products = 1 if self.repeats_keys and not is_windowed else 2
                total += num_products * width * kv_heads * head_dim + head_dim
        return total

    def other_parameters(self, width: int, num_layers: int) -> int:
        streams, short = self.num_streams, self.embedding_width
        total = self.looked_up_parameters(num_layers)
        if short:
            total += num_layers * (2 * width * short + width) + width * num_layers * short + short
        if streams > 1:
            routed = streams**2 + streams**3 + streams * width + 2 * width
            total += num_layers * (routed + 2 * self.laurel_rank * width + width) + 2 * (streams - 1) * width**2
        return total

    def looked_up_parameters(self, num_layers: int) -> int:
        return self.embedding_vocab * num_layers * self.embedding_width


@dataclass(frozen=True, slots=True)
class ProductMultipliers:
    """They are multiplied into the weights when these are loaded."""

    queries: float
    keys: float
    values: float
    mixer_inputs: tuple[float, float, float, float, float]  # of gates, inputs, b, c and time steps of Mamba-2
    attended: float  # of what attention adds to the residual stream
    mixed: float  # of what the mixer beside it does
    gates: float  # of the feed-forward part, before the nonlinearity
    down: float


MXFP4_GROUP, NVFP4_GROUP = 32, 16  # inputs that share a scale


class QuantMethod(enum.Enum):
    """Formats of quantised checkpoints by their `quant_method`."""

    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    FP8 = "fp8"
    MXFP4 = "mxfp4"
    MODELOPT = "modelopt"
    BLOCKS = "gguf_blocks"  # our own: of GGUF's, in safetensors


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One way in which matrices of a checkpoint may be quantised."""

    num_bits: int
    is_float: bool = False
    group_size: int | None = None  # inputs that share a scale; None: a whole row, or the whole matrix
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, in place of `group_size`
    is_symmetric: bool = True  # there are no zero points; GPTQ: they are all the same
    has_8_bit_inputs: bool = False  # made for products whose inputs are rounded to 8 bits as well

    @property
    def label(self) -> str:
        bits = f"{'float' if self.is_float else 'int'}{self.num_bits}"
        if self.block is not None:
            return f"{bits} in blocks of {self.block[0]} x {self.block[1]}"
        return bits if self.group_size is None else f"{bits} in groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The quantised matrices of a checkpoint; others are stored as in any folder."""

    method: QuantMethod
    schemes: tuple[WeightScheme, ...]  # every quantised matrix has one of them
    zero_offset: int = 0  # GPTQ: stored zero points are smaller by this
    remarks: tuple[str, ...] = ()  # what the config asks for beside the weights and is done otherwise

    def has_float4(self, group_size: int) -> bool:
        """Return whether matrices may be floats of 4 bits, of which so many share a scale."""
        return any(
            scheme.is_float and scheme.num_bits == 4 and scheme.group_size == group_size for scheme in self.schemes
        )

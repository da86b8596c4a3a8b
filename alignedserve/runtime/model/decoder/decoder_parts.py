"""Kinds of the parts of a decoder, and the sizes of some: norms, activations, experts; without torch."""

import enum
from dataclasses import dataclass


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

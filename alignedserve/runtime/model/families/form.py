"""What a family of decoders has, as a row of the table describes it: its tensors' names, and its config's meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import Activation, ExpertConfig, HeadNormKind, NormKind
from alignedserve.runtime.model.decoder.latent_config import LatentConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.states import StateLayers
from alignedserve.runtime.model.families.windows import NO_WINDOW, WindowRule
from alignedserve.runtime.model.hf_fields import Sizes
from alignedserve.runtime.model.weight_names import ParameterNames


class Flag(NamedTuple):
    """A field of config.json that says whether there is something, and what holds without it."""

    name: str
    default: bool = False

    def read(self, fields: JsonFields) -> bool:
        return fields.flag(self.name, self.default)


class Named(NamedTuple):
    """A field of config.json by another name than Llama's, or with another default."""

    name: str
    default: str | float


_WHOLE = Named("partial_rotary_factor", 1.0)
_SILU = Named("hidden_act", "silu")
_EPS = Named("rms_norm_eps", 1e-6)
_ATTENTION_BIAS, _MLP_BIAS = Flag("attention_bias"), Flag("mlp_bias")


@dataclass(frozen=True, slots=True)
class FamilyForm:
    """One family. What is left out is as Llama has it; defaults are those that transformers assumes."""

    title: str  # as its makers call the models
    names: ParameterNames
    read: Callable[[JsonFields, str, "FamilyForm"], ModelConfig]  # of the fields and the model_type
    defaults: tuple[tuple[str, object], ...] = ()  # fields that published configs leave out
    refused: tuple[str, ...] = ()  # flags and numbers that may not be set: what they turn on is not there

    # Attention
    num_kv_heads: int | None = None  # without num_key_value_heads; None: as many as heads
    head_dim: int | None = None  # without head_dim; None: the width divided among the heads
    theta: float = 10000.0
    rotated: Named = _WHOLE  # the share of each head
    windows: WindowRule = NO_WINDOW
    has_chunked_windows: bool = False
    # The layers without rotation, by the fields, the number of layers and those with a window.
    unrotated: Callable[[JsonFields, int, tuple[int, ...]], tuple[int, ...]] | None = None
    latent: Callable[[JsonFields], LatentConfig] | None = None  # in place of keys and values of heads
    states: Callable[[JsonFields, Sizes], StateLayers] | None = None  # of layers that do not attend
    has_attention_gate: bool = False
    has_sinks: bool = False
    has_caps: bool = False  # of scores and of logits
    has_rope_pair: bool = False  # layers with a window have a rotation of their own
    windowed_theta: float = 10000.0  # of that one
    head_norm: HeadNormKind = HeadNormKind.NONE
    has_head_norm: Flag | bool = True  # False: there is no such norm after all
    qkv_bias: Flag | bool = _ATTENTION_BIAS
    output_bias: Flag | bool = _ATTENTION_BIAS

    # Feed-forward part
    activation: Named | Activation = _SILU  # one that no field names: whatever the config says
    is_gated: bool = True
    mlp_bias: Flag | bool = _MLP_BIAS
    dense_size: str = "intermediate_size"
    has_size_lists: bool = False  # it may be a list, of each layer's
    experts: Callable[[JsonFields, int], ExpertConfig | None] | None = None  # of the fields and the number of layers

    # Norms and the stream between layers
    norm: NormKind = NormKind.RMS
    norm_eps: Named = _EPS
    has_input_norms: bool = True
    has_post_norms: bool = False
    parallel_residual: Flag | bool = False
    ties_embeddings: bool = False  # without tie_word_embeddings
    adapt: Callable[[ModelConfig, JsonFields], ModelConfig] | None = None  # adds multipliers and the like


def holds(flag: Flag | bool, fields: JsonFields) -> bool:
    return flag if isinstance(flag, bool) else flag.read(fields)

"""The names of encoders' tensors, by family."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from alignedserve.runtime.model.encoder.encoder_config import EncoderFamily, HeadActivation


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Modules of one family; those of a layer follow `layer`, all but the head's `prefix` where files have it."""

    prefix: str
    layer: str
    qkv: tuple[str, str, str]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    head_dense: str  # of a cross-encoder
    head_activation: HeadActivation  # after it
    head_out: str
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    segments: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"


_BERT = EncoderNames(
    prefix="bert.",
    layer="encoder.layer.{layer}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
    head_dense="bert.pooler.dense",
    head_activation=HeadActivation.TANH,
    head_out="classifier",
)
_ROBERTA = replace(_BERT, prefix="roberta.", head_dense="classifier.dense", head_out="classifier.out_proj")
_DISTILBERT = EncoderNames(
    prefix="distilbert.",
    layer="transformer.layer.{layer}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    head_dense="pre_classifier",
    head_activation=HeadActivation.RELU,
    head_out="classifier",
)
ENCODER_NAMES: Mapping[EncoderFamily, EncoderNames] = MappingProxyType(
    {
        EncoderFamily.BERT: _BERT,
        EncoderFamily.ROBERTA: _ROBERTA,
        EncoderFamily.XLM_ROBERTA: _ROBERTA,
        EncoderFamily.CAMEMBERT: _ROBERTA,
        EncoderFamily.DISTILBERT: _DISTILBERT,
    }
)

"""Reads config.json of an encoder's folder, and the files of sentence-transformers beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig, EncoderFamily, HeadActivation
from alignedserve.runtime.model.encoder.sentence_files import (
    max_text_tokens,
    read_embedding_config,
    read_head_activation,
)
from alignedserve.runtime.model.hf_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    read_activation,
    read_dtype,
)
from alignedserve.runtime.model.model_config import Activation
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT

ENCODER_TYPES = tuple(family.value for family in EncoderFamily)
_SCORING = "ForSequenceClassification"
_MAX_TOKEN_TYPES = 1 << 10
_DEFAULT_LABELS = 2  # of transformers, where config.json names none


class _Sizes(TypedDict):
    """The sizes that families spell differently, as arguments of EncoderConfig."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    position_offset: int
    num_token_types: int
    activation: Activation
    norm_eps: float


def is_encoder_type(fields: JsonFields) -> bool:
    """Return whether config.json is of a family of encoders."""
    return fields.text("model_type", "") in ENCODER_TYPES


def parse_encoder_config(fields: JsonFields, folder: Path) -> EncoderConfig:
    """Parse config.json of `folder`, which is of an encoder, and what lies beside it.

    Raises UnsupportedModel naming the option that is not supported, ModelError naming the field that is wrong.
    """
    family = EncoderFamily(fields.text("model_type"))
    sizes = _READERS[family](fields)
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise fields.error("the number of attention heads", "must divide the hidden size")
    if fields.flag("is_decoder", False) or fields.text("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel(f"{fields.where}: only encoders with absolute positions are supported.")
    num_positions = fields.integer("max_position_embeddings", 1, MAX_CONTEXT, 512)
    longest = num_positions - sizes["position_offset"]
    if longest < 1:
        raise fields.error("max_position_embeddings", "leaves no position for a token")
    config = EncoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCABULARY),
        num_positions=num_positions,
        dtype=read_dtype(fields),
        max_position_embeddings=min(longest, max_text_tokens(folder) or longest),
        score=_score(fields),
        **sizes,
    )
    if config.score is not None:
        return config
    return replace(config, embedding=read_embedding_config(folder, fields, config.hidden_size))


def _read_bert(fields: JsonFields) -> _Sizes:
    return {
        "hidden_size": fields.integer("hidden_size", 1, MAX_WIDTH),
        "intermediate_size": fields.integer("intermediate_size", 1, MAX_WIDTH),
        "num_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": fields.integer("num_attention_heads", 1, MAX_HEADS),
        "position_offset": 0,
        "num_token_types": fields.integer("type_vocab_size", 1, _MAX_TOKEN_TYPES, 2),
        "activation": read_activation(fields, "hidden_act", "gelu"),
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0, 1e-12),
    }


def _read_roberta(fields: JsonFields) -> _Sizes:
    # Positions are counted from behind the padding token's id.
    sizes = _read_bert(fields)
    sizes["position_offset"] = fields.integer("pad_token_id", 0, MAX_VOCABULARY, 1) + 1
    return sizes


def _read_distilbert(fields: JsonFields) -> _Sizes:
    return {
        "hidden_size": fields.integer("dim", 1, MAX_WIDTH, 768),
        "intermediate_size": fields.integer("hidden_dim", 1, MAX_WIDTH, 3072),
        "num_layers": fields.integer("n_layers", 1, MAX_LAYERS, 6),
        "num_heads": fields.integer("n_heads", 1, MAX_HEADS, 12),
        "position_offset": 0,
        "num_token_types": 0,
        "activation": read_activation(fields, "activation", "gelu"),
        "norm_eps": 1e-12,
    }


_READERS: dict[EncoderFamily, Callable[[JsonFields], _Sizes]] = {
    EncoderFamily.BERT: _read_bert,
    EncoderFamily.ROBERTA: _read_roberta,
    EncoderFamily.XLM_ROBERTA: _read_roberta,
    EncoderFamily.CAMEMBERT: _read_roberta,
    EncoderFamily.DISTILBERT: _read_distilbert,
}


def _score(fields: JsonFields) -> HeadActivation | None:
    """Return what a cross-encoder applies to its output; None: the model is no cross-encoder."""
    architectures = fields.texts("architectures", 8)
    if not any(name.endswith(_SCORING) for name in architectures):
        return None
    num_labels = fields.num_entries("id2label") or _DEFAULT_LABELS
    if num_labels != 1:
        raise UnsupportedModel(
            f"{fields.where}: a classifier with {num_labels} labels is not supported, only a cross-encoder, with one."
        )
    return read_head_activation(fields)

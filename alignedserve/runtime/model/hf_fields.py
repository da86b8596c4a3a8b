"""Reads the fields that the config.json of several families share."""

from typing import TypedDict

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import Activation
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT

MAX_WIDTH = 1 << 18
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_EXPERTS = 1 << 12
MAX_VOCABULARY = 1 << 22

DEFAULT_WINDOW = 4096

ACTIVATIONS = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class Sizes(TypedDict):
    """The sizes that every family has, as arguments of ModelConfig."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]


def read_sizes(fields: JsonFields, family: str) -> Sizes:
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    return {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, MAX_WIDTH),
        "num_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": fields.integer("num_attention_heads", 1, MAX_HEADS),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        "dtype": read_dtype(fields),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
    }


def default_head_dim(fields: JsonFields, sizes: Sizes) -> int:
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise fields.error("num_attention_heads", "must divide hidden_size")
    return sizes["hidden_size"] // sizes["num_heads"]


def read_num_kv_heads(fields: JsonFields, num_heads: int, default: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", "must divide num_attention_heads")
    return num_kv_heads


def read_activation(fields: JsonFields, name: str, default: str) -> Activation:
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"Activation {value!r} ({name}) is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def read_dtype(fields: JsonFields, default: str = "float32") -> str:
    name = fields.text("dtype", fields.text("torch_dtype", default)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}.")
    return name

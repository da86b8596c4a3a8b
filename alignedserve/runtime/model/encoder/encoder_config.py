"""The configuration of an encoder: sizes, and what is made of its hidden states; without torch."""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from alignedserve.core.block_layout import DTYPE_BYTES, BlockLayout
from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_list, read_json_object
from alignedserve.runtime.model.decoder.decoder_parts import Activation
from alignedserve.runtime.model.hf_fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    read_activation,
    read_dtype,
)


class EncoderFamily(enum.Enum):
    """Encoder families by the `model_type` of config.json."""

    BERT = "bert"
    ROBERTA = "roberta"
    XLM_ROBERTA = "xlm-roberta"
    CAMEMBERT = "camembert"
    DISTILBERT = "distilbert"


class Pooling(enum.Enum):
    """How the hidden states of a text's tokens become one vector, by sentence-transformers' names."""

    CLS = "cls"  # the first token's
    MEAN = "mean"
    MAX = "max"  # element by element
    MEAN_SQRT = "mean_sqrt_len_tokens"  # the sum over the root of the number of tokens
    WEIGHTED_MEAN = "weightedmean"  # token i, from 1 on, counts i times
    LAST = "lasttoken"


class HeadActivation(enum.Enum):
    """Nonlinearities after pooling."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer after pooling, with weights in a folder of its own."""

    folder: str  # inside the model's
    in_width: int
    out_width: int
    has_bias: bool
    activation: HeadActivation


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a text's vector is made of its hidden states."""

    pooling: Pooling = Pooling.MEAN
    dense: tuple[DenseConfig, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()  # (name, what is put before a text)
    default_prompt: str | None = None  # the name of the one that is used where none is chosen
    is_matryoshka: bool = False  # trained so that the first elements of a vector are a vector too
    dimensions: tuple[int, ...] = ()  # the lengths that it may be cut to; none: any


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder: each token attends to the whole prompt. All sizes are positive and consistent."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # rows of the table of positions
    position_offset: int  # the row of the first token
    num_token_types: int  # 0: the model does not tell the texts of a pair apart
    activation: Activation
    norm_eps: float
    dtype: str  # of the files, a key of DTYPE_BYTES
    max_position_embeddings: int  # the longest prompt, special tokens included
    embedding: EmbeddingConfig = EmbeddingConfig()
    score: HeadActivation | None = None  # a cross-encoder: what turns its output into a score

    # What those ask for who serve decoders too.
    eos_token_ids: tuple[int, ...] = ()
    stored_quantization: None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def embedding_size(self) -> int:
        return self.hidden_size

    @property
    def vector_width(self) -> int:
        if self.score is not None:
            return 1
        return self.embedding.dense[-1].out_width if self.embedding.dense else self.hidden_size

    @property
    def num_projected(self) -> int:
        """Return the number of weights that every token is multiplied with."""
        return self.num_layers * (4 * self.hidden_size + 2 * self.intermediate_size) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        looked_up = (self.vocab_size + self.num_positions + self.num_token_types) * self.hidden_size
        per_layer = 9 * self.hidden_size + self.intermediate_size  # biases and norms
        return looked_up + self.num_projected + self.num_layers * per_layer + 2 * self.hidden_size + self._head_weights

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype]

    def loaded_weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        projected_bytes = 1 if quantization == "int8" else DTYPE_BYTES[dtype]
        return (self.num_parameters - self.num_projected) * DTYPE_BYTES[dtype] + self.num_projected * projected_bytes

    def block_layout(self, block_size: int, dtype: str) -> BlockLayout:
        """Return the layout of blocks: those of a prompt hold one layer, which all layers use one after another."""
        return BlockLayout(
            block_size=block_size, num_layers=1, num_kv_heads=self.num_heads, head_dim=self.head_dim, dtype=dtype
        )

    def hidden_block_tokens(self, block_size: int) -> int | None:
        """Return None: there are no hidden caches."""
        return None

    @property
    def _head_weights(self) -> int:
        if self.score is not None:
            return (self.hidden_size + 1) * self.hidden_size + self.hidden_size + 1
        return sum(dense.out_width * (dense.in_width + dense.has_bias) for dense in self.embedding.dense)


_MAX_FILE_BYTES = 1 << 20
_MAX_MODULES = 8
_MAX_PROMPTS = 64
_MAX_PROMPT_LEN = 4096
_MODULES, _SETTINGS, _TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# The flags of Pooling's config.json; newer ones name the mode.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": HeadActivation.IDENTITY,
    "torch.nn.modules.activation.Sigmoid": HeadActivation.SIGMOID,
    "torch.nn.modules.activation.Tanh": HeadActivation.TANH,
    "torch.nn.modules.activation.ReLU": HeadActivation.RELU,
}
ENCODER_TYPES = tuple(family.value for family in EncoderFamily)
_SCORING = "ForSequenceClassification"
_MAX_TOKEN_TYPES = 1 << 10
_DEFAULT_LABELS = 2  # of transformers, where config.json names none


class _Sizes(TypedDict):
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    position_offset: int
    num_token_types: int
    activation: Activation
    norm_eps: float


def is_encoder_type(fields: JsonFields) -> bool:
    return fields.text("model_type", "") in ENCODER_TYPES


def parse_encoder_config(fields: JsonFields, folder: Path) -> EncoderConfig:
    """Parse an encoder's config.json, and the files of its folder. Raises UnsupportedModel, ModelError naming the
    field."""
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
    architectures = fields.texts("architectures", 8)
    if not any(name.endswith(_SCORING) for name in architectures):
        return None
    num_labels = fields.num_entries("id2label") or _DEFAULT_LABELS
    if num_labels != 1:
        raise UnsupportedModel(
            f"{fields.where}: a classifier with {num_labels} labels is not supported, only a cross-encoder, with one."
        )
    return read_head_activation(fields)


def read_embedding_config(folder: Path, fields: JsonFields, hidden_size: int) -> EmbeddingConfig:
    """Read how a text's vector is made: the mean of all tokens unless modules.json says otherwise. `fields`: of
    config.json."""
    pooling, dense = Pooling.MEAN, list[DenseConfig]()
    if (folder / _MODULES).exists():
        pooling, dense = _read_modules(folder, hidden_size)
    prompts, default = _read_prompts(folder)
    dimensions = fields.integers("matryoshka_dimensions", 1, MAX_WIDTH)
    return EmbeddingConfig(
        pooling=pooling,
        dense=tuple(dense),
        prompts=prompts,
        default_prompt=default,
        is_matryoshka=bool(dimensions) or fields.flag("is_matryoshka", False),
        dimensions=dimensions,
    )


def max_text_tokens(folder: Path) -> int | None:
    """Return the length that texts of this model were trained with, where a file says so."""
    path = folder / _TEXTS
    if not path.exists():
        return None
    fields = JsonFields(read_json_object(path, _MAX_FILE_BYTES), str(path))
    if fields.flag("do_lower_case", False):
        raise UnsupportedModel(f"{path}: do_lower_case is not supported; a tokenizer that lowers texts itself is.")
    return fields.integer("max_seq_length", 1, MAX_CONTEXT) if fields.has("max_seq_length") else None


def read_head_activation(fields: JsonFields) -> HeadActivation:
    """Return what turns a cross-encoder's output into a score, by config.json; the sigmoid where it says nothing."""
    section = fields.section("sentence_transformers")
    name = fields.text("sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid")
    if section is not None:
        name = section.text("activation_fn", name)
    return _activation(name, fields.where)


def _activation(name: str, where: str) -> HeadActivation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{where}: the activation function is not one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _read_modules(folder: Path, hidden_size: int) -> tuple[Pooling, list[DenseConfig]]:
    path = folder / _MODULES
    kinds = []
    pooling, dense = None, list[DenseConfig]()
    for entry in read_json_list(path, _MAX_FILE_BYTES, _MAX_MODULES):
        fields = JsonFields(entry, str(path))
        kind, at = fields.text("type").rpartition(".")[2], fields.text("path", "")
        kinds.append(kind)
        if kind == "Transformer" and at:
            raise UnsupportedModel(f"{path}: an encoder in a folder of its own is not supported; name that folder.")
        if kind == "Pooling":
            pooling = _read_pooling(_inside(folder, at, path))
        elif kind == "Dense":
            width = dense[-1].out_width if dense else hidden_size
            dense.append(_read_dense(_inside(folder, at, path), at, width))
    is_known = re.fullmatch(r"Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds))
    if pooling is None or is_known is None:
        raise UnsupportedModel(f"{path}: modules must be Transformer, Pooling, any Dense and Normalize, in this order.")
    return pooling, dense


def _inside(folder: Path, name: str, where: Path) -> Path:
    if not _FOLDER.fullmatch(name):
        raise ModelError(f"{where}: a path is not the plain name of a folder.")
    return folder / name / "config.json"


def _read_pooling(path: Path) -> Pooling:
    fields = JsonFields(read_json_object(path, _MAX_FILE_BYTES), str(path))
    if not fields.flag("include_prompt", True):
        raise UnsupportedModel(f"{path}: pooling without the prompt (include_prompt) is not supported.")
    if fields.is_present("pooling_mode"):
        name, names = fields.text("pooling_mode"), {pooling.value: pooling for pooling in Pooling}
        if name not in names:
            raise UnsupportedModel(f"{path}: pooling_mode is not one of {', '.join(names)}.")
        return names[name]
    modes = [mode for name, mode in _POOLING_FLAGS.items() if fields.flag(name, False)]
    if len(modes) != 1:
        raise UnsupportedModel(f"{path}: exactly one mode of pooling is supported, not {len(modes)}.")
    return modes[0]


def _read_dense(path: Path, folder: str, in_width: int) -> DenseConfig:
    fields = JsonFields(read_json_object(path, _MAX_FILE_BYTES), str(path))
    if fields.integer("in_features", 1, MAX_WIDTH) != in_width:
        raise fields.error("in_features", f"must be {in_width}, as wide as what comes before")
    activation = _activation(fields.text("activation_function", "torch.nn.modules.activation.Tanh"), str(path))
    out_width = fields.integer("out_features", 1, MAX_WIDTH)
    return DenseConfig(folder, in_width, out_width, fields.flag("bias", True), activation)


def _read_prompts(folder: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    path = folder / _SETTINGS
    if not path.exists():
        return (), None
    content: Mapping[str, Any] = read_json_object(path, _MAX_FILE_BYTES)
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    is_mapping = isinstance(prompts, dict) and len(prompts) <= _MAX_PROMPTS
    if not is_mapping or not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_LEN for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of at most {_MAX_PROMPTS} short strings.")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ModelError(f"{path}: default_prompt_name is none of the prompts.")
    return tuple(prompts.items()), default

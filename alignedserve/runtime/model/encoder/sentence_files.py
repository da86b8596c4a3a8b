"""Reads the files by which sentence-transformers describes an encoder; code that they name is never imported."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_list, read_json_object
from alignedserve.runtime.model.encoder.encoder_config import DenseConfig, EmbeddingConfig, HeadActivation, Pooling
from alignedserve.runtime.model.hf_fields import MAX_WIDTH
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT

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


def read_embedding_config(folder: Path, fields: JsonFields, hidden_size: int) -> EmbeddingConfig:
    """Read how a text's vector is made; `fields`: of config.json.

    The mean of all tokens where no modules.json says otherwise, as in sentence-transformers. Raises UnsupportedModel,
    ModelError.
    """
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
    own = fields.section("sentence_transformers")
    name = fields.text("sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid")
    if own is not None:
        name = own.text("activation_fn", name)
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
    """Return the prompts by name, and the name of the default one."""
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

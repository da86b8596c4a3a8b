"""Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.
"""

from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelError, ModelNotFound, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import (
    ENCODER_TYPES,
    EncoderConfig,
    is_encoder_type,
    parse_encoder_config,
)
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.named_models import near_names
from alignedserve.runtime.model.quantized.config import read_quantization
from alignedserve.runtime.model.quantized.layout import has_weight
from alignedserve.runtime.model.weight_index import WeightIndex
from alignedserve.runtime.model.weight_names import find_head, find_prefix
from alignedserve.text.tokenizer_files import end_token_id

MAX_CONFIG_BYTES = 1 << 20
GENERATION_CONFIG = "generation_config.json"


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of the model in `folder`. Raises ModelNotFound, UnsupportedModel naming the architecture or
    option that is not supported, ModelError naming the wrong field."""
    if not folder.is_dir():
        short = f" Short names: {', '.join(near_names(str(folder)))}." if folder.name == str(folder) else ""
        raise ModelNotFound(
            f"{folder} is neither a folder here nor a name on a hub (ORG/NAME, such as Qwen/Qwen3-0.6B).{short}"
        )
    path = folder / "config.json"
    config = parse_model_config(read_json_object(path, MAX_CONFIG_BYTES), where=str(path))
    is_tied = config.ties_embeddings and not _has_both_ends(config, folder)
    return replace(config, eos_token_ids=_end_tokens(config, folder), ties_embeddings=is_tied)


def _has_both_ends(config: ModelConfig, folder: Path) -> bool:
    """Return whether the files hold an embedding and a head: a head in the files counts, whatever config.json says."""
    try:
        has = partial(has_weight, WeightIndex(folder))
    except ModelError:  # reading the weights raises the same
        return False
    names = FAMILIES[config.family].names
    return has(f"{find_prefix(names, has)}{names.embedding}.weight") and has(f"{find_head(names, has)}.weight")


def _end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    end_ids, path = config.eos_token_ids, folder / GENERATION_CONFIG
    if path.exists():
        generation = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
        end_ids = generation.token_ids("eos_token_id", config.vocab_size) or end_ids
    end_id = end_token_id(folder)
    return end_ids if end_id is None or end_id in end_ids or end_id >= config.vocab_size else (*end_ids, end_id)


def read_any_config(folder: Path) -> ModelConfig | EncoderConfig:
    """Read the config of the decoder or encoder in `folder`. Raises like `read_model_config`."""
    path = folder / "config.json"
    if not path.exists():
        return read_model_config(folder)
    fields = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    return parse_encoder_config(fields, folder) if is_encoder_type(fields) else read_model_config(folder)


def parse_model_config(content: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse an already decoded config.json. Raises like `read_model_config`."""
    content = _with_scaling(content)
    text = content.get("text_config")
    fields = JsonFields({**content, "text_config": _with_scaling(text)} if isinstance(text, dict) else content, where)
    model_type = fields.text("model_type")
    if is_encoder_type(fields):
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is an encoder's, and a decoder is needed here.")
    form = FAMILIES.get(model_type)
    if form is None:
        known = (*FAMILIES, *ENCODER_TYPES)
        near = get_close_matches(model_type, known, n=2)
        hint = f" The nearest: {' and '.join(near)}." if near else ""
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is not one of {', '.join(known)}.{hint}")
    return replace(form.read(fields, model_type, form), stored_quantization=read_quantization(fields))


_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section")  # what a scaling leaves as it is


def _with_scaling(content: dict[str, Any]) -> dict[str, Any]:
    """Move `rope_scaling` into `rope_parameters`: makers' pages say to add it, whatever stands there already."""
    parameters, scaling = content.get("rope_parameters"), content.get("rope_scaling")
    if not isinstance(parameters, dict) or not isinstance(scaling, dict) or not scaling:
        return content
    if "full_attention" in parameters or "sliding_attention" in parameters:
        merged = {**parameters, "full_attention": _scaled(parameters.get("full_attention"), scaling)}
    else:
        stated = {name: value for name, value in content.items() if value is not None}
        merged = _scaled({**parameters, **stated}, scaling)
    return {**content, "rope_parameters": merged}


def _scaled(parameters: Any, scaling: dict[str, Any]) -> dict[str, Any]:
    stated = parameters if isinstance(parameters, dict) else {}
    return {**{name: stated[name] for name in _BESIDE_SCALING if name in stated}, **scaling}

"""Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.
"""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelNotFound, UnsupportedModel
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
from alignedserve.text.tokenizer_files import end_token_id

MAX_CONFIG_BYTES = 1 << 20


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
    return replace(config, eos_token_ids=_end_tokens(config, folder))


def _end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    found, path = config.eos_token_ids, folder / "generation_config.json"
    if path.exists():
        generation = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
        found = generation.token_ids("eos_token_id", config.vocab_size) or found
    own = end_token_id(folder)
    return found if own is None or own in found or own >= config.vocab_size else (*found, own)


def read_any_config(folder: Path) -> ModelConfig | EncoderConfig:
    """Read the config of the decoder or encoder in `folder`. Raises like `read_model_config`."""
    path = folder / "config.json"
    if not path.exists():
        return read_model_config(folder)
    fields = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    return parse_encoder_config(fields, folder) if is_encoder_type(fields) else read_model_config(folder)


def parse_model_config(content: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse an already decoded config.json. Raises like `read_model_config`."""
    fields = JsonFields(content, where)
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

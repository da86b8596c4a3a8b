"""Checkpoints of transformers as GGUF files, with llama.cpp's names, order of rows and entries, for tests."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.config import GGUF_NAMES
from alignedserve.runtime.model.weight_names import ParameterNames

_ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "granite": "granite",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3_moe": "qwen3moe",
}
_INTERLEAVED = ("llama", "granite")  # architectures


def write_converted(folder: Path, config: Any, path: Path, type_name: str = "F32", **changed: Any) -> Path:
    """Write the checkpoint in `folder` as one file. `changed`: entries, by their names without the architecture."""
    architecture = _ARCHITECTURES[config.model_type]
    writer: Any = gguf.GGUFWriter(path, architecture)
    for name, value in {**_entries(config), **changed}.items():
        add = (
            writer.add_bool
            if isinstance(value, bool)
            else writer.add_uint32
            if isinstance(value, int)
            else writer.add_float32
        )
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{name.replace('__', '.')}", value)
    for name, tensor in _tensors(folder, config, architecture).items():
        values = tensor.float().numpy()
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _entries(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entries: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] == "yarn":
        entries |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type == "mixtral":
        entries |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if config.model_type == "qwen3_moe":
        entries |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        entries["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "phi3":
        entries["attention.sliding_window"] = config.sliding_window or 0
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        entries["rope.scaling.original_context_length"] = original
        if "long_factor" in rope:
            growth = math.log(config.max_position_embeddings / original) / math.log(original)
            entries["rope.scaling.attn_factor"] = math.sqrt(1.0 + growth)
    if config.model_type == "granite":
        entries |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    return entries


def _tensors(folder: Path, config: Any, architecture: str) -> dict[str, Tensor]:
    stored = load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = {}
    for ours, theirs in _renamed(config, stored).items():
        tensor = stored[theirs]
        for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            if architecture in _INTERLEAVED and part in ours:
                tensor = _interleaved(tensor, heads)
        found[ours] = tensor
    for kind in ("short", "long"):
        if f"{kind}_factor" in config.rope_parameters:
            found[f"rope_factors_{kind}.weight"] = torch.tensor(config.rope_parameters[f"{kind}_factor"])
    return _stacked(found)


def _renamed(config: Any, stored: dict[str, Tensor]) -> dict[str, str]:
    """Return llama.cpp's name of every tensor, and transformers'."""
    names = FAMILIES[config.model_type].names
    above = names.prefixes[0]
    modules = {"token_embd": above + names.embedding, "output_norm": above + names.final_norm}
    modules["output"] = names.lm_heads[0]
    for layer in range(config.num_hidden_layers):
        prefix, our_prefix = above + names.layer.format(layer=layer), GGUF_NAMES.layer.format(layer=layer)
        for theirs, ours in _module_pairs(names):
            for expert in range(64 if "{expert}" in theirs else 1):
                modules[our_prefix + ours.format(expert=expert)] = prefix + theirs.format(expert=expert)
    ends = ("weight", "bias")
    return {f"{a}.{end}": f"{b}.{end}" for a, b in modules.items() for end in ends if f"{b}.{end}" in stored}


def _module_pairs(names: ParameterNames) -> list[tuple[str, str]]:
    """Return the modules of a layer: transformers' name and llama.cpp's."""
    qkv = GGUF_NAMES.qkv if len(names.qkv) == 3 else ("attn_qkv",)
    gate_up = GGUF_NAMES.gate_up if len(names.gate_up) == 2 else ("ffn_up",)
    single = ("attention_norm", "mlp_norm", "output", "down", "query_norm", "key_norm", "router", "expert_down")
    pairs = [(getattr(names, field), getattr(GGUF_NAMES, field)) for field in single if getattr(names, field)]
    pairs += [*zip(names.qkv, qkv, strict=True), *zip(names.gate_up, gate_up, strict=True)]
    return pairs + list(zip(names.expert_gate_up, GGUF_NAMES.expert_gate_up, strict=False))


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Put the rows of the two halves of each head side by side, as converters do."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts of a layer into one tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        module, is_expert, rest = name.partition("_exps.")
        found.setdefault(f"{module}_exps.weight" if is_expert and rest else name, []).append(tensor)
    return {name: torch.stack(parts) if "_exps." in name else parts[0] for name, parts in found.items()}


def split_in_parts(path: Path, count: int) -> list[Path]:
    """Write a file again as `count` parts, as llama-gguf-split does. Returns the paths."""
    reader: Any = gguf.GGUFReader(path)
    tensors = list(reader.tensors)
    paths = [path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    for number, part in enumerate(paths):
        writer: Any = gguf.GGUFWriter(part, "unused")
        writer.kv_data[0].clear()
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF."):
                kind = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], kind)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[number * len(tensors) // count : (number + 1) * len(tensors) // count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths

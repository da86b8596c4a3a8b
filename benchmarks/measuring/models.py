"""Folders of models to be served with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from alignedserve.runtime.lora.adapter_check import adaptable_modules
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.named_models import pocket_folder
from lab.profiling.shapes import OPT_125M

_CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": OPT_125M.vocab_size,
    "hidden_size": OPT_125M.hidden_size,
    "word_embed_proj_dim": OPT_125M.embedding_size,
    "ffn_dim": OPT_125M.intermediate_size,
    "num_hidden_layers": OPT_125M.num_layers,
    "num_attention_heads": OPT_125M.num_heads,
    "max_position_embeddings": OPT_125M.max_position_embeddings,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": 256,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def make_opt_125m(folder: Path) -> Path:
    """Write the shape of OPT 125M, with the shipped model's tokenizer, into a new folder and return it.

    Made-up words stand for the rest of the vocabulary: random weights choose any token, and a token without text would
    not be seen by a client.
    """
    return _make(folder, _CONFIG)


def make_gemma3(folder: Path) -> Path:
    return _make(folder, _GEMMA3)


def _make(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(pocket_folder() / "tokenizer_config.json", folder)
    tokenizer = json.loads((pocket_folder() / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"word{number}": number for number in range(config["vocab_size"]) if number not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


_IMAGE, _START, _END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
_SEEING_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    f"{_START}{_IMAGE}{_END}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SEEING_VOCAB = 4096
_SEEING: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": _SEEING_VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]},
    },
    "vision_config": {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "depth": 12,
        "num_heads": 6,
        "patch_size": 16,
        "num_position_embeddings": 576,
        "deepstack_visual_indexes": [3, 6, 9],
        "out_hidden_size": 512,
    },
    "image_token_id": _SEEING_VOCAB - 3,
    "eos_token_id": 2,
}


def make_seeing(folder: Path) -> Path:
    """Write a small model that sees, in the form of Qwen3-VL, into a new folder and return it; see `make_opt_125m`.

    28M weights of the text part, 35M of the encoder; a picture of a megapixel is 1 024 tokens, the smallest one is one.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_SEEING))
    images = {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}, "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    settings = json.loads((pocket_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _SEEING_TEMPLATE}))
    tokenizer = json.loads((pocket_folder() / "tokenizer.json").read_text())
    first = _SEEING_VOCAB - 3
    marks = [{**tokenizer["added_tokens"][0], "id": first + at, "content": mark} for at, mark in enumerate(_MARKS)]
    tokenizer["added_tokens"] += marks
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"word{number}": number for number in range(_SEEING_VOCAB) if number not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


_MARKS = (_IMAGE, _START, _END)


def make_adapters(folder: Path, config: ModelConfig, count: int, *, rank: int = 8) -> dict[str, Path]:
    """Write LoRA adapters of all linear layers with small random matrices into a folder; return theirs by name."""
    made = {f"adapter{number}": folder / f"adapter{number}" for number in range(count)}
    for seed, path in enumerate(made.values()):
        path.mkdir()
        numbers, tensors = np.random.default_rng(seed), {}
        modules = {name: own for name, own in adaptable_modules(config).items() if name.startswith("model.")}
        for name, own in modules.items():
            for part, shape in (("A", (rank, own.in_width)), ("B", (own.num_rows, rank))):
                matrix = 0.01 * numbers.standard_normal(shape, np.float32)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = matrix
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, path / "adapter_model.safetensors")
    return made

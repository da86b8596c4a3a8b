"""Write the model folder that ships: weights in bfloat16 and the config files beside the tokenizer.

python scripts/pocket/export.py RUN_FOLDER/weights.safetensors alignedserve/pocket/model
"""

import argparse
import json
from pathlib import Path

import torch
from pocket_model import PocketShape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

_EMBEDDINGS = "model.embed_tokens.weight"
_SPECIAL = (("bos", "bos"), ("eos", "end"), ("pad", "pad"))  # name in the config, name in the tokenizer


def write_config(shape: PocketShape, folder: Path) -> None:
    """Write config.json and generation_config.json beside the tokenizer in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special: dict[str, object] = {f"{name}_token_id": tokenizer.token_to_id(f"<|{word}|>") for name, word in _SPECIAL}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {**special, "do_sample": False})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(weights: Path, folder: Path) -> None:
    """Turn training weights into the model folder that ships."""
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(weights).items()}
    num_layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    shape = PocketShape(vocab_size=tensors[_EMBEDDINGS].shape[0], num_layers=num_layers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(shape, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    export(options.weights, options.folder)

"""What contexts of models with windows take of a cache, and how much of that no layer reads any more.

python -m benchmarks.memory.windows

A block holds keys and values of all layers and stays as long as its context, so layers with a window keep what lies
behind it (docs/decisions/0072-windows-in-blocks.md). Sizes are counted, nothing is computed.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.model_config import ModelConfig

_BLOCK_SIZE, _DTYPE_BYTES = 16, 2  # tokens; of bfloat16
_GEMMA: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 256, "vocab_size": 262144}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "Gemma 3 4B": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "Gemma 3n E4B": {
        **_GEMMA,
        "model_type": "gemma3n_text",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
    },
    "Gemma 4, as transformers has it": {
        **_GEMMA,
        "model_type": "gemma4_text",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "global_head_dim": 512,
        "sliding_window": 512,
    },
    "Llama 4 Scout": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "attention_chunk_size": 8192,
    },
    "Mistral 7B v0.1": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


def config_of(fields: dict[str, Any]) -> ModelConfig:
    """Return the configuration that a folder with these fields has."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"max_position_embeddings": 131072, **fields}))
        return read_model_config(Path(folder))


def taken_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of the blocks of a context."""
    layout = config.block_layout(_BLOCK_SIZE, "bfloat16")
    return layout.blocks_for(num_tokens) * layout.block_bytes


def read_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of what its next token may read, in whole blocks for each layer."""
    num_blocks, found = -(-num_tokens // _BLOCK_SIZE), 0
    for layer in config.cached_layers:
        heads = config.heads_of(layer)
        first = _first_read(config, num_tokens) if layer in config.windowed_layers else 0
        num_slots = (num_blocks - first // _BLOCK_SIZE) * _BLOCK_SIZE
        found += num_slots * config.kv_parts * heads.num_kv_heads * heads.head_dim * _DTYPE_BYTES
    return found


def _first_read(config: ModelConfig, position: int) -> int:
    """Return the first position that a layer with a window reads for the token at `position`."""
    window = config.sliding_window or position + 1
    if config.has_chunked_windows:
        return position // window * window
    return max(position + 1 - window, 0)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[768, 8000, 32000, 128000], help="of contexts")
    lengths = parser.parse_args().tokens
    heads = " | ".join(f"{num_tokens} tokens take; read" for num_tokens in lengths)
    print(f"| bfloat16 | layers with a window, all | {heads} |")
    print("|---|---" + "|---" * len(lengths) + "|")
    for name, fields in MODELS.items():
        config = config_of(fields)
        windowed = sum(layer in config.windowed_layers for layer in config.cached_layers)
        sizes = [
            f"{taken_bytes(config, count) / 1e6:.0f}; {read_bytes(config, count) / 1e6:.0f} MB" for count in lengths
        ]
        print(f"| {name} | {windowed} of {config.sliding_window}, {len(config.cached_layers)} | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main()

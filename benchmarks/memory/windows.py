"""Counts what contexts of models with windows take of a cache, whole and in rings, and what of it some layer reads.

python -m benchmarks.memory.windows [--run]

Sizes are counted, nothing is computed (docs/decisions/0081-windows-that-forget.md). With --run also, in one process
and both forms of the same memory: documents that come together, and conversations that take turns, on a small Gemma 3
of random weights. The answers of both forms must be the same.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.served_model import RING, WHOLE, ServedModel, resolve_model
from benchmarks.measuring.recording import write_result
from benchmarks.memory.states import Talk, Worker, talk_in_turns

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

SMALL: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 128,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}


def config_of(fields: dict[str, Any]) -> ModelConfig:
    """Return the configuration that a folder with these fields has."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"max_position_embeddings": 131072, **fields}))
        return read_model_config(Path(folder))


def taken_bytes(config: ModelConfig, num_tokens: int, *, has_rings: bool = False) -> int:
    """Return the bytes of the blocks of a context."""
    layout = config.block_layout(_BLOCK_SIZE, "bfloat16")
    return (config.layout_of_rings(layout) if has_rings else layout).bytes_of(num_tokens)


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


def print_sizes(lengths: list[int]) -> None:
    """Print a row for each model."""
    heads = " | ".join(f"{num_tokens} tokens take; in rings; read" for num_tokens in lengths)
    print(f"| bfloat16 | layers with a window, all | {heads} |")
    print("|---|---" + "|---" * len(lengths) + "|")
    for name, fields in MODELS.items():
        config = config_of(fields)
        windowed = sum(layer in config.windowed_layers for layer in config.cached_layers)
        sizes = []
        for count in lengths:
            rings = f"{taken_bytes(config, count, has_rings=True) / 1e6:.0f}" if config.may_have_rings else "-"
            taken, read = taken_bytes(config, count) / 1e6, read_bytes(config, count) / 1e6
            sizes.append(f"{taken:.0f}; {rings}; {read:.0f} MB")
        print(f"| {name} | {windowed} of {config.sliding_window}, {len(config.cached_layers)} | {' | '.join(sizes)} |")


def served_in(form: str) -> ServedModel:
    """Return the small model in one of the forms."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL))
        section = ModelSectionConfig(path=folder, random_weights=True, dtype="float32")
        return resolve_model(section, EngineConfig(device="cpu", window_cache=form))


def run(form: str, memory_bytes: int, num_documents: int, document_len: int, answer_len: int) -> dict[str, Any]:
    """Let a worker answer documents, then conversations, and return what it did with the answers."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 500) for _ in range(document_len)] for _ in range(num_documents)]
    documents = {f"document {number}": prompt for number, prompt in enumerate(prompts)}
    worker = Worker(served_in(form), memory_bytes)
    began = time.perf_counter()
    answers = worker.answers(documents, answer_len)
    seconds = time.perf_counter() - began
    # Of an answer the last token is not computed.
    again = worker.num_computed - num_documents * (document_len + answer_len - 1)
    most_running = worker.most_running
    worker.close()
    worker = Worker(served_in(form), memory_bytes)
    talk = talk_in_turns(worker, Talk(6, 4, 300, 60, 24, memory_bytes))
    worker.close()
    return {
        "form": form,
        "seconds": round(seconds, 2),
        "documents_per_s": round(num_documents / seconds, 3),
        "tokens_computed_again": again,
        "most_running": most_running,
        "turns_found_share": round(talk.num_cached / talk.num_prompt_tokens, 3),
        "answers": [list(map(list, answers.values())), list(map(list, talk.answers))],
    }


def main() -> None:
    """Print the sizes; with --run what both forms do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[768, 8000, 32000, 128000], help="of contexts")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--document-len", type=int, default=3000)
    parser.add_argument("--answer-len", type=int, default=256)
    parser.add_argument("--memory-mib", type=int, default=96, help="of a worker's cache")
    parser.add_argument("--rounds", type=int, default=3, help="of both forms, in turns")
    arguments = parser.parse_args()
    print_sizes(arguments.tokens)
    if not arguments.run:
        return
    torch.set_num_threads(1)
    sizes = (arguments.memory_mib << 20, arguments.documents, arguments.document_len, arguments.answer_len)
    found = [run(form, *sizes) for _ in range(arguments.rounds) for form in (WHOLE, RING)]
    answers = [one.pop("answers") for one in found]
    for one in found:
        print(one, flush=True)
    is_same = all(one == answers[0] for one in answers)
    print(f"The same answers: {is_same}")
    write_result("memory/windows", {"runs": found, "same_answers": is_same, "cache_bytes": sizes[0]})


if __name__ == "__main__":
    main()

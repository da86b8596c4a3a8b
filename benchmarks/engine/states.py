"""Layers with a state against transformers, on one thread: python -m benchmarks.engine.states [--dtype bfloat16].

Random weights of three kinds of layers, eight of width 1024; seconds of the process, so that others on the machine
count little. Prints a row of a table for each.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weights.random_weights import random_weights

PROMPT_LEN, NUM_STREAMS, NUM_STEPS, BLOCK_SIZE = 256, 16, 8, 64
_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "short convolutions": (
        "Lfm2Config",
        {"intermediate_size": 4608, "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5]}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "Mamba-2": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2, "num_local_experts": 0, "mamba_n_heads": 32}
        | {"shared_intermediate_size": 2048, "mamba_d_head": 64, "mamba_d_state": 128, "num_attention_heads": 16},
    ),
    "gated delta rule": (
        "Qwen3_5TextConfig",
        {"intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
        | {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    ),
}
_SAMPLING = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


class Rates(NamedTuple):
    """Tokens per second of the process."""

    prompt: float
    one_stream: float
    streams: float


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def own_rates(folder: Path, dtype: str) -> Rates:
    """Measure the engine."""
    config = read_model_config(folder)
    num_blocks = -(-(PROMPT_LEN + _SAMPLING.max_tokens) // BLOCK_SIZE)
    engine = Engine(
        model=Decoder(config, random_weights(config, 0, torch_dtype(dtype))),
        storage=BlockStorage(config.block_layout(BLOCK_SIZE, dtype), num_blocks * NUM_STREAMS),
        max_sequences=NUM_STREAMS,
        max_context_len=512,
    )
    for stream in range(NUM_STREAMS):
        tokens = tuple(3 + (7 * stream + place) % 8000 for place in range(PROMPT_LEN))
        blocks = tuple(map(BlockId, range(stream * num_blocks, (stream + 1) * num_blocks)))
        engine.add_sequence(NewSequence(RequestId(str(stream)), tokens, PROMPT_LEN, 0, blocks, _SAMPLING))
        whole = _seconds(partial(engine.execute, [StepSlice(RequestId(str(stream)), PROMPT_LEN)]))

    def decode(count: int) -> float:
        slices = [StepSlice(RequestId(str(stream)), 1) for stream in range(count)]
        return NUM_STEPS * count / _seconds(lambda: [engine.execute(slices) for _ in range(NUM_STEPS)])

    return Rates(PROMPT_LEN / whole, decode(1), decode(NUM_STREAMS))


def reference_rates(config: Any, dtype: str) -> Rates:
    """Measure transformers."""
    model = import_module("transformers").AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype)).eval()

    def decode(count: int) -> tuple[float, float]:
        tokens = torch.randint(3, 8000, (count, PROMPT_LEN))
        kept: dict[str, Any] = {}
        whole = _seconds(lambda: kept.update(out=model(tokens, use_cache=True, logits_to_keep=1)))
        cache = kept["out"].past_key_values
        steps = _seconds(lambda: [model(tokens[:, -1:], past_key_values=cache) for _ in range(NUM_STEPS)])
        return PROMPT_LEN * count / whole, NUM_STEPS * count / steps

    with torch.inference_mode():
        decode(1)
        prompt, one = decode(1)
        return Rates(prompt, one, decode(NUM_STREAMS)[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    dtype = parser.parse_args().dtype
    torch.set_num_threads(1)
    for name, (class_name, arguments) in MODELS.items():
        config = getattr(import_module("transformers"), class_name)(**_COMMON | arguments)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            own = own_rates(Path(folder), dtype)
        pairs = zip(own, reference_rates(config, dtype), strict=True)
        print(f"| {name} | {dtype} | {' | '.join(f'{ours:.0f}; {theirs:.0f}' for ours, theirs in pairs)} |", flush=True)


if __name__ == "__main__":
    main()

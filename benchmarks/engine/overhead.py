"""Cost of an engine step outside the forward pass: 64 decoding rows, greedy, contexts of 64 and 2000 tokens.

The model is one small layer, so that many steps fit a short run; the work around the pass is the same for any model but
for the vocabulary, over which sampling takes a maximum.

    python -m benchmarks.engine.overhead
"""

import json
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.microbench.shapes import LLAMA_0_5B
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import RopeConfig
from alignedserve.runtime.model.random_weights import random_weights
from benchmarks.support.recording import write_result

NUM_ROWS, NUM_STEPS, BLOCK_SIZE = 64, 200, 16


def main() -> None:
    """Measure every combination, print it and write it."""
    cases = [
        measure(vocab_size, context_len, is_mixed)
        for vocab_size in (1000, 50272)
        for context_len in (64, 2000)
        for is_mixed in (False, True)
    ]
    print(json.dumps(cases, indent=2))
    write_result("engine_overhead", {"rows": NUM_ROWS, "threads": torch.get_num_threads(), "cases": cases})


def measure(vocab_size: int, context_len: int, is_mixed: bool) -> dict[str, object]:
    """Measure milliseconds per step outside the pass, over NUM_STEPS decode steps.

    Mixed: contexts from half of it to all.
    """
    engine, slices = make_engine(vocab_size, context_len, is_mixed)
    prepare, sampling, outside = [], [], []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        times = engine.execute(slices).times
        elapsed = time.perf_counter() - started
        prepare.append(times.prepare_s * 1e3)
        sampling.append(times.sampling_s * 1e3)
        outside.append((elapsed - times.forward_s) * 1e3)
    return {
        "vocab_size": vocab_size,
        "context_len": context_len,
        "is_mixed": is_mixed,
        "prepare_ms": _spread(prepare),
        "sampling_ms": _spread(sampling),
        "outside_forward_ms": _spread(outside),
    }


def make_engine(vocab_size: int, context_len: int, is_mixed: bool) -> tuple[Engine, list[StepSlice]]:
    """Make an engine with NUM_ROWS sequences that decode from their first step: their cache counts as computed."""
    config = replace(LLAMA_0_5B, num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, head_dim=32)
    config = replace(config, embedding_size=64, vocab_size=vocab_size, rope=RopeConfig(rotary_dim=32))
    max_context_len = context_len + NUM_STEPS + 1
    blocks_per_row = blocks_for(max_context_len, BLOCK_SIZE)
    storage = BlockStorage(config.block_layout(BLOCK_SIZE, "float32"), NUM_ROWS * blocks_per_row)
    storage.zero_blocks(np.arange(storage.num_blocks))
    decoder = Decoder(config, random_weights(config, 0, torch.float32))
    engine = Engine(model=decoder, storage=storage, max_sequences=NUM_ROWS, max_context_len=max_context_len)
    shuffled = np.random.default_rng(0).permutation(storage.num_blocks)
    for row in range(NUM_ROWS):
        length = context_len - (context_len // 2) * row // NUM_ROWS if is_mixed else context_len
        block_ids = tuple(BlockId(block) for block in shuffled[row::NUM_ROWS].tolist())
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS)
        engine.add_sequence(NewSequence(RequestId(f"r{row}"), (1,) * length, length, length - 1, block_ids, sampling))
    return engine, [StepSlice(RequestId(f"r{row}"), 1) for row in range(NUM_ROWS)]


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "p99": round(float(np.percentile(values, 99)), 4),
        "mean": round(statistics.mean(values), 4),
    }


if __name__ == "__main__":
    main()

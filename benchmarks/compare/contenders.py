"""The contenders of `benchmarks.compare` that run in this environment, one per process.

    python -m benchmarks.compare.contenders alignedserve|alignedserve_int8|transformers SHAPE DTYPE WORKLOAD

SHAPE may be a model's folder or GGUF file for ours.

Plays the workload once for every line on stdin, and answers each with a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alignedserve.core.block_layout import INT8
from alignedserve.microbench.engine.throughput import (
    EngineBenchmarkSpec,
    RequestGroup,
    WorkloadRun,
    load_decoder,
    make_engine,
)
from alignedserve.runtime.device.dtypes import torch_dtype
from benchmarks.compare.shapes import TRANSFORMERS_CONFIGS

Lengths = list[tuple[int, int]]


def main() -> None:
    """Load, then one run per line."""
    name, shape, dtype, workload = sys.argv[1:]
    lengths: Lengths = [(prompt_len, output_len) for prompt_len, output_len in json.loads(workload)]
    play = CONTENDERS[name](shape, dtype, lengths)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        play()
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def make_alignedserve(shape: str, dtype: str, lengths: Lengths, kv_cache_dtype: str = "auto") -> Callable[[], None]:
    """Return the engine that workers run, without a cluster around it."""
    groups = tuple(RequestGroup(1, prompt_len, output_len) for prompt_len, output_len in lengths)
    spec = EngineBenchmarkSpec(model=shape, groups=groups, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    engine = make_engine(load_decoder(shape, dtype), spec)
    WorkloadRun(engine, spec, (RequestGroup(1, 4, 2),)).run()
    return lambda: WorkloadRun(engine, spec, groups).run()


def make_transformers(shape: str, dtype: str, lengths: Lengths) -> Callable[[], None]:
    """Make `generate` on static batches of equal prompts, as it knows no other; each batch to its longest output."""
    config: Any = AutoConfig.for_model(**TRANSFORMERS_CONFIGS[shape])
    chosen: Any = AutoModelForCausalLM
    model: Any = chosen.from_config(config, dtype=torch_dtype(dtype)).eval()
    batches: dict[int, list[int]] = {}
    for prompt_len, output_len in lengths:
        batches.setdefault(prompt_len, []).append(output_len)

    def play() -> None:
        for prompt_len, outputs in batches.items():
            num_tokens = max(outputs)
            prompts = torch.randint(4, config.vocab_size, (len(outputs), prompt_len))
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

    return play


CONTENDERS: dict[str, Callable[[str, str, Lengths], Callable[[], None]]] = {
    "alignedserve": make_alignedserve,
    "alignedserve_int8": partial(make_alignedserve, kv_cache_dtype=INT8),
    "transformers": make_transformers,
}


if __name__ == "__main__":
    main()

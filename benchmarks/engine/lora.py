"""Decode steps of 32 requests with 0, 1, 8 and 32 different LoRA adapters of rank 16, beside none, and beside a loop
that computes the requests of each adapter in a step of their own.

    python -m benchmarks.engine.lora
"""

import argparse
import statistics
import time

import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.lora.adapter_modules import product_shapes
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.random_weights import random_weights
from benchmarks.support.recording import write_result
from kernels.addend_layout import LayerProduct, site_of, up_column
from kernels.cpu.lora import LoraModule
from kernels.lora import AdapterMatrices

NUM_REQUESTS, RANK, PROMPT_LEN, BLOCK_SIZE = 32, 16, 64, 16
NUM_ADAPTERS = (0, 1, 8, 32)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def random_adapter(config: ModelConfig, dtype: torch.dtype, seed: int) -> AdapterMatrices:
    """Return an adapter of every projection."""
    generator = torch.Generator().manual_seed(seed)
    shapes = product_shapes(config)
    adapter = AdapterMatrices(shapes, config.num_layers, dtype, torch.device("cpu"))

    def module(first: int, in_width: int, columns: int) -> LoraModule:
        a, b = torch.randn(RANK, in_width, generator=generator), torch.randn(columns, RANK, generator=generator)
        return LoraModule(first, columns, (a * 0.02, b * 0.02))

    widths = (config.query_width, config.kv_width, config.kv_width)
    for layer in range(config.num_layers):
        for product, shape in enumerate(shapes):
            parts = widths if product == 0 else (shape.out_width,) * (2 if shape.is_gated else 1)
            firsts = [sum(parts[:i]) if product == 0 else up_column(shape.out_width) * i for i in range(len(parts))]
            own = [module(first, shape.in_width, count) for first, count in zip(firsts, parts, strict=True)]
            adapter.set(site_of(layer, LayerProduct(product)), own)
    return adapter


class Batch:
    """32 sequences that decode, with so many different adapters."""

    def __init__(self, decoder: Decoder, adapters: list[AdapterMatrices], max_steps: int) -> None:
        self.groups: list[list[StepSlice]] = [[] for _ in range(max(len(adapters), 1))]
        blocks = -(-(PROMPT_LEN + max_steps + 1) // BLOCK_SIZE)
        storage = BlockStorage(decoder.config.block_layout(BLOCK_SIZE, decoder.dtype_name), NUM_REQUESTS * blocks)
        self.engine = Engine(model=decoder, storage=storage, max_sequences=NUM_REQUESTS, max_context_len=1024)
        for number in range(NUM_REQUESTS):
            request_id, group = RequestId(f"r{number}"), number % len(self.groups)
            own = tuple(BlockId(number * blocks + block) for block in range(blocks))
            sampling = SamplingParams(temperature=0.0, max_tokens=max_steps, ignore_eos=True)
            prompt = tuple(3 + (number * 31 + at) % 30000 for at in range(PROMPT_LEN))
            adapter = adapters[group] if adapters else None
            self.engine.add_sequence(NewSequence(request_id, prompt, PROMPT_LEN, 0, own, sampling, adapter=adapter))
            self.groups[group].append(StepSlice(request_id, 1))
            self.engine.execute([StepSlice(request_id, PROMPT_LEN)])

    def step_s(self, *, by_adapter: bool = False) -> float:
        """Return the seconds of one token of every sequence."""
        slices = [part for group in self.groups for part in group]
        started = time.perf_counter()
        for part in self.groups if by_adapter else [slices]:
            self.engine.execute(part)
        return time.perf_counter() - started


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    config = parse_model_config(SHAPE, "benchmark")
    decoder = Decoder(config, random_weights(config, 0, dtype, torch.device("cpu"), None))
    adapters = [random_adapter(config, dtype, seed) for seed in range(max(NUM_ADAPTERS))]
    batches = {count: Batch(decoder, adapters[:count], 2 * options.rounds + 4) for count in NUM_ADAPTERS}
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for count, batch in batches.items():
            times.setdefault(f"{count} adapters", []).append(batch.step_s())
        for count in NUM_ADAPTERS[1:]:
            times.setdefault(f"{count} adapters, one step each", []).append(batches[count].step_s(by_adapter=True))
    medians = {name: statistics.median(own[2:]) for name, own in times.items()}
    base = medians["0 adapters"]
    for name, seconds in medians.items():
        print(f"{name:32} {seconds * 1e3:7.2f} ms  {NUM_REQUESTS / seconds:7.0f} tokens/s  {base / seconds:5.2f}")
    rows = [
        {"name": name, "step_ms": seconds * 1e3, "throughput_to_none": base / seconds}
        for name, seconds in medians.items()
    ]
    write_result("lora", {"dtype": options.dtype, "threads": options.threads, "rank": RANK, "rows": rows})


if __name__ == "__main__":
    main()

"""Effect of a KV cache of 8 bits (engine.kv_cache_dtype=int8): speed of the 125M OPT shape, accuracy of the pocket
model.

    python -m benchmarks.precision.int8_cache [rounds] [tasks per skill and context length]

Speed: sequences with contexts as in workload w4, half of their outputs generated, all decode one token per step, over
an exact cache and over one of int8 by turns; random weights, medians. Then whole prompts of 1 024 tokens likewise.
Kernel: decode attention of 16 contexts of 512 tokens by one thread, in processor time, which other work on the machine
disturbs less, for the heads of some shapes.
Accuracy: the tasks of `alignedserve eval`, and the logits of the right answers, in float32 against an exact cache.
"""

import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import INT8, BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.evaluation.accuracy import EvalItem, make_items
from alignedserve.loadgen.prompts import load_tokenizer
from alignedserve.microbench.engine.throughput import load_decoder
from alignedserve.microbench.engine.workloads import parse_workload
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepTimes
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.text.chat_prompt import ChatPrompt
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.precision.quantization import distance, evaluate, load, logits_of, table_of
from benchmarks.support.recording import write_result
from kernels.cpu.paged_attention import Int8Heads, PagedAttention, PagedPlan, supported_levels
from kernels.int8_rows import quantise_rows

SHAPE, DTYPES = "opt-125m", ("float32", "bfloat16")
BLOCK_SIZE, NUM_SEQUENCES = 16, 64
PROMPT_LEN, NUM_PROMPTS = 1024, 2
DEFAULT_ROUNDS, DEFAULT_TASKS = 15, 10
NUM_LOGIT_TASKS = 100
HEADS = ((12, 1, 64), (8, 4, 128), (2, 7, 64), (2, 8, 128))  # kv_heads, group, head_dim
NUM_CONTEXTS, CONTEXT_LEN, KERNEL_ROUNDS = 16, 512, 30


class Batch:
    """Sequences over one storage, whose cache is made up, that decode again and again from the same lengths."""

    def __init__(self, decoder: Decoder, cache_dtype: str, lengths: list[int], num_cached: list[int]) -> None:
        """`lengths`: known tokens of each; the first `num_cached` of them are in the cache."""
        layout = decoder.config.block_layout(BLOCK_SIZE, cache_dtype)
        self.layout, self._lengths, self._num_cached = layout, lengths, num_cached
        storage = BlockStorage(layout, sum(blocks_for(length + 1, BLOCK_SIZE) for length in lengths))
        _fill(storage)
        self._engine = Engine(
            model=decoder, storage=storage, max_sequences=len(lengths), max_context_len=max(lengths) + 1
        )

    def step(self) -> StepTimes:
        """Compute everything after what is cached, in one step."""
        engine, first, slices = self._engine, 0, []
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        for index, (length, cached) in enumerate(zip(self._lengths, self._num_cached, strict=True)):
            count = blocks_for(length + 1, BLOCK_SIZE)
            blocks = tuple(map(BlockId, range(first, first + count)))
            first += count
            request_id, tokens = RequestId(str(index)), tuple(range(3, 3 + length))
            engine.add_sequence(NewSequence(request_id, tokens, length, cached, blocks, sampling))
            slices.append((request_id, length - cached))
        output = engine.execute(slices)
        for request_id, _ in slices:
            engine.remove_sequence(request_id)
        return output.times


def _fill(storage: BlockStorage) -> None:
    """Fill every block alike with random keys and values."""
    layout = storage.layout
    for layer in range(layout.num_layers):
        for slots in (storage.key_slots(layer), storage.value_slots(layer)):
            heads = torch.randn(layout.block_size, layout.num_kv_heads, layout.head_dim)
            rows = quantise_rows(heads) if layout.is_int8 else heads.flatten(1).to(slots.dtype)
            slots[: layout.block_size] = rows
    storage.bytes[1:] = storage.bytes[0]


def by_turns(batches: dict[str, Batch], num_rounds: int) -> dict[str, Any]:
    """Return the medians of forward pass and attention, in milliseconds, and those of the ratios of each round."""
    times: dict[str, list[StepTimes]] = {name: [] for name in batches}
    for round_number in range(num_rounds + 1):  # the first warms up
        for name, batch in batches.items():
            measured = batch.step()
            if round_number:
                times[name].append(measured)
    parts: dict[str, Callable[[StepTimes], float]] = {
        "forward_ms": lambda one: 1e3 * one.forward_s,
        "attention_ms": lambda one: 1e3 * (one.attention_s + one.chunk_attention_s),
    }
    figures: dict[str, Any] = {
        name: {part: statistics.median(map(of, own)) for part, of in parts.items()} for name, own in times.items()
    }
    exact, int8 = times.values()
    for part, of in parts.items():
        figures[f"{part.removesuffix('_ms')}_speedup"] = statistics.median(
            of(one) / of(other) for one, other in zip(exact, int8, strict=True)
        )
    return figures


def measure_speed(dtype: str, num_rounds: int) -> dict[str, Any]:
    """Measure decoding and prompts."""
    decoder = load_decoder(SHAPE, dtype)
    groups = parse_workload("w4")[:NUM_SEQUENCES]
    lengths = [group.prompt_len + group.output_len // 2 + 1 for group in groups]

    def compare(known: list[int], cached: list[int], rounds: int) -> dict[str, Any]:
        return by_turns({name: Batch(decoder, name, known, cached) for name in (dtype, INT8)}, rounds)

    layouts = [decoder.config.block_layout(BLOCK_SIZE, name) for name in (dtype, INT8)]
    return {
        "bytes_per_token": {layout.dtype: layout.token_bytes for layout in layouts},
        "mean_context": statistics.mean(lengths),
        "decode": compare(lengths, [length - 1 for length in lengths], num_rounds),
        "prompts": compare([PROMPT_LEN] * NUM_PROMPTS, [0] * NUM_PROMPTS, max(3, num_rounds // 4)),
    }


def measure_kernel(dtype: str, heads: tuple[int, int, int]) -> dict[str, float]:
    """Return the median nanoseconds per token and query head. `heads`: kv_heads, group, head_dim."""
    kv_heads, group, head_dim = heads
    blocks_each = CONTEXT_LEN // BLOCK_SIZE
    tables = np.arange(NUM_CONTEXTS * blocks_each).reshape(NUM_CONTEXTS, blocks_each)
    rows, lengths = np.arange(NUM_CONTEXTS), np.full(NUM_CONTEXTS, CONTEXT_LEN)
    queries = torch.randn(NUM_CONTEXTS, kv_heads, group, head_dim).to(torch_dtype(dtype))
    out = torch.empty_like(queries)
    runs: list[tuple[str, PagedAttention, PagedPlan, list[int]]] = []
    for name in (dtype, INT8):
        storage = BlockStorage(BlockLayout(BLOCK_SIZE, 1, kv_heads, head_dim, name), tables.size)
        _fill(storage)
        int8 = Int8Heads(kv_heads, queries.dtype) if name == INT8 else None
        paged = PagedAttention(storage.blocks, group=group, level=supported_levels()[0], int8=int8)
        runs.append((name, paged, paged.plan_decode(tables, rows, lengths, None, 1), []))
    for _ in range(KERNEL_ROUNDS):
        for _, paged, plan, times in runs:
            started = time.thread_time_ns()
            paged.run(plan, queries, out, 0, False)
            times.append(time.thread_time_ns() - started)
    num_read = NUM_CONTEXTS * CONTEXT_LEN * kv_heads * group
    figures = {f"{name}_ns": statistics.median(times) / num_read for name, _, _, times in runs}
    of_exact, of_int8 = figures.values()
    return {**figures, "speedup": of_exact / of_int8}


@torch.inference_mode()
def compare_logits(items: list[EvalItem]) -> dict[str, float]:
    """Return the distances of logits from those of an exact cache, means over the texts."""
    tokenizer, decoder = Tokenizer.load(pocket_folder()), load(None)
    now = datetime.now().astimezone()
    distances = []
    for item in items:
        prompt = tokenizer.encode_chat(ChatPrompt([{"role": "user", "content": item.task.prompt}]), now=now)
        token_ids = [*prompt, *tokenizer.encode(item.task.answer, add_special_tokens=False)]
        distances.append(distance(logits_of(decoder, token_ids), logits_of(decoder, token_ids, INT8)))
    columns = zip(*(one._asdict().items() for one in distances), strict=True)
    return {column[0][0]: statistics.mean(value for _, value in column) for column in columns}


def measure_accuracy(num_tasks: int) -> dict[str, Any]:
    """Answer the tasks with both caches, and compare logits."""
    items = make_items(num_tasks, 0, load_tokenizer(pocket_folder()))
    figures: dict[str, Any] = {
        "tasks": len(items),
        "logits": compare_logits(items[:: -(-len(items) // NUM_LOGIT_TASKS)]),
    }
    for cache in ("auto", INT8):
        report = evaluate(None, items, cache)
        figures[cache] = {"share_right": 1.0 - len(report.wrong) / len(items), **table_of(report)}
    return figures


def main() -> None:
    """Measure, print, record."""
    num_rounds, num_tasks = (
        int(sys.argv[index]) if len(sys.argv) > index else default
        for index, default in ((1, DEFAULT_ROUNDS), (2, DEFAULT_TASKS))
    )
    started = time.monotonic()
    figures: dict[str, Any] = {"rounds": num_rounds, "threads": torch.get_num_threads()}
    for dtype in DTYPES:
        kernels = {f"{heads[0]} x {heads[1]} x {heads[2]}": measure_kernel(dtype, heads) for heads in HEADS}
        figures[dtype] = {**measure_speed(dtype, num_rounds), "kernel": kernels}
        print(dtype, figures[dtype], flush=True)
    figures["accuracy"] = measure_accuracy(num_tasks)
    print(figures["accuracy"], f"{time.monotonic() - started:.0f} s", flush=True)
    write_result("int8_cache", figures)


if __name__ == "__main__":
    main()

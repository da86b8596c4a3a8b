"""Offline throughput of the engine alone: no router, no pool, no Ray.

A simple loop admits requests in order while rows and blocks last, prefills them within a token budget per step, and
decodes all running ones in every step.
"""

import importlib
import resource
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepOutput, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import weights_in_files
from alignedserve.runtime.model.named_models import model_path
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.sharding.tensor_shard import check_tensor_parallel
from alignedserve.runtime.model.weights.weight_loader import DecoderWeights
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.ceilings import Ceilings, ProductClock, measure_ceilings
from benchmarks.engine.workloads import RequestGroup
from benchmarks.measuring.results import EngineBenchmarkResult
from kernels.float8_linear import has_float8_products
from lab.profiling.model_loading import config_of, weights_of
from lab.profiling.shapes import SHAPES


def _load(spec: EngineBenchmarkSpec) -> tuple[ModelConfig, DecoderWeights]:
    config = config_of(spec.model)
    return config, weights_of(spec.model, config, spec.dtype, spec.device, spec.quantization, seed=spec.seed)


def run_engine_benchmark(spec: EngineBenchmarkSpec) -> EngineBenchmarkResult:
    """Load the model and run the workload once, after one short run that warms caches up; then measure the ceilings of
    a CPU."""
    if spec.tensor_parallel > 1:
        return _run_ranks(spec)
    config, weights = _load(spec)
    _check_context(config, spec)
    is_cpu = torch.device(spec.device).type == "cpu"
    clock = ProductClock()
    engine = make_engine(Decoder(config, clock.watch(weights) if is_cpu else weights), spec)
    _warm_up(engine, spec)
    clock.reset()
    run = WorkloadRun(engine, spec, spec.groups, clock)
    started = time.perf_counter()
    run.run()
    wall_s = time.perf_counter() - started
    held = weight_bytes(config, spec.model, spec.dtype, spec.device, spec.quantization)
    if not is_cpu:
        peaks = (peak_rss_bytes(), int(torch.cuda.max_memory_allocated()))
        return _result(spec, engine, _TimedRun(run.times, None, wall_s, held, *peaks), None)
    measured = _TimedRun(run.times, clock.seconds, wall_s, held, peak_rss_bytes(), None)
    return _result(spec, engine, measured, measure_ceilings(weights, clock, held.step_bytes, run.times.num_steps))


def _run_ranks(spec: EngineBenchmarkSpec) -> EngineBenchmarkResult:
    config = config_of(spec.model)
    check_tensor_parallel(config, spec.tensor_parallel)
    _check_context(config, spec)
    torch.set_num_threads(max(torch.get_num_threads() // spec.tensor_parallel, 1))
    ranked = importlib.import_module("benchmarks.engine.ranked")  # loads msgspec
    with ranked.started_ranks(ranked.rank_spec(spec, config)) as engine:
        _warm_up(engine, spec)
        run = WorkloadRun(engine, spec, spec.groups)
        started = time.perf_counter()
        run.run()
        wall_s = time.perf_counter() - started
        held = weight_bytes(config, spec.model, spec.dtype, spec.device, spec.quantization)
        measured = _TimedRun(run.times, None, wall_s, held, peak_rss_bytes(), None)
        return _result(spec, engine, measured, None)


class WeightBytes(NamedTuple):
    """The bytes of a model's weights."""

    num_bytes: int  # of all in memory
    step_bytes: int  # that every step reads whole, whatever its tokens; of experts, those of a single token


def weight_bytes(
    config: ModelConfig, model: str, dtype: str, device: str = "cpu", quantization: str | None = None
) -> WeightBytes:
    """Return the bytes of the weights of a named shape, or of the model in a folder."""
    stored = None
    if model not in SHAPES:
        computing = Computing(device, dtype, has_float8_products(device))
        stored = weights_in_files(model_path(model), config, computing, quantization)
    if stored is not None:
        return WeightBytes(stored.num_bytes, stored.step_bytes)
    step_bytes = config.num_multiplied * (1 if quantization == "int8" else torch_dtype(dtype).itemsize)
    return WeightBytes(config.loaded_weight_bytes(dtype, quantization), step_bytes)


def _warm_up(engine: Engine, spec: EngineBenchmarkSpec) -> None:
    warm_up = RequestGroup(min(4, spec.max_sequences), min(8, spec.max_context_len - 1), 2)
    if warm_up.prompt_len >= 1 and spec.max_context_len > warm_up.prompt_len + 2:
        WorkloadRun(engine, spec, (warm_up,)).run()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_engine(decoder: Decoder, spec: EngineBenchmarkSpec) -> Engine:
    """Make an engine with blocks for just the `max_sequences` longest requests of the workload; on a GPU with
    its decode steps recorded."""
    layout = decoder.config.block_layout(spec.block_size, spec.cache_dtype)
    storage = BlockStorage(layout, spec.num_blocks, spec.device)
    engine = Engine(
        model=decoder,
        storage=storage,
        options=EngineOptions(
            max_sequences=spec.max_sequences, max_context_len=spec.max_context_len, attention=spec.attention
        ),
    )
    engine.record_graphs()
    return engine


@dataclass(slots=True)
class _ActiveRequest:
    prompt_len: int
    output_len: int
    block_ids: tuple[BlockId, ...]
    num_prefilled: int = 0
    num_generated: int = 0


@dataclass(slots=True)
class WorkloadTimes:
    """Sums over the steps of a run, in seconds."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prepare_s: float = 0.0
    sampling_s: float = 0.0
    attention_s: float = 0.0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class _TimedRun:
    times: WorkloadTimes
    linear_s: float | None  # None on a GPU, as the ceilings
    wall_s: float
    weight_bytes: WeightBytes
    peak_rss_bytes: int
    peak_device_bytes: int | None


@dataclass(slots=True)
class WorkloadRun:
    """One pass over the groups. Ends when every request has its output."""

    engine: Engine
    spec: EngineBenchmarkSpec
    groups: tuple[RequestGroup, ...]
    clock: ProductClock | None = None
    times: WorkloadTimes = field(default_factory=WorkloadTimes)
    _running: dict[RequestId, _ActiveRequest] = field(default_factory=dict)

    def run(self) -> None:
        waiting = deque(self._requests())
        allocator = BlockAllocator(self.engine.storage.num_blocks)
        while waiting or self._running:
            while waiting and self._admit(waiting[0], allocator):
                waiting.popleft()
            slices, has_prefill = self._slices()
            output = self.engine.execute(slices)
            self._account(output, has_prefill)
            self._finish(output, allocator)

    def _requests(self) -> list[NewSequence]:
        generator = np.random.default_rng(self.spec.seed)
        vocab_size = self.engine.model.config.vocab_size
        requests: list[NewSequence] = []
        for group in self.groups:
            for _ in range(group.num_requests):
                prompt = tuple(generator.integers(0, vocab_size, group.prompt_len).tolist())
                sampling = SamplingParams(temperature=0.0, max_tokens=group.output_len, ignore_eos=True)
                request_id = RequestId(f"request-{len(requests)}")
                requests.append(NewSequence(request_id, prompt, len(prompt), 0, (), sampling))
        return requests

    def _admit(self, request: NewSequence, allocator: BlockAllocator) -> bool:
        if len(self._running) >= self.spec.max_sequences:
            return False
        output_len = request.sampling.max_tokens
        block_ids = allocator.allocate(blocks_for(request.prompt_len + output_len, self.spec.block_size))
        if block_ids is None:
            return False
        self.engine.add_sequence(request)
        self.engine.append_blocks(request.request_id, block_ids)
        self._running[request.request_id] = _ActiveRequest(request.prompt_len, output_len, block_ids)
        return True

    def _slices(self) -> tuple[list[StepSlice], bool]:
        slices = [StepSlice(request_id, 1) for request_id, running in self._running.items() if running.num_generated]
        budget = self.spec.max_step_tokens
        num_decodes = len(slices)
        for request_id, running in self._running.items():
            count = min(budget, running.prompt_len - running.num_prefilled)
            if count <= 0:
                continue
            slices.append(StepSlice(request_id, count))
            running.num_prefilled += count
            budget -= count
        return slices, len(slices) > num_decodes

    def _account(self, output: StepOutput, has_prefill: bool) -> None:
        times = self.times
        times.num_steps += 1
        times.prepare_s += output.times.prepare_s
        times.sampling_s += output.times.sampling_s
        times.attention_s += output.times.attention_s + output.times.chunk_attention_s
        if has_prefill:
            times.prefill_s += output.times.forward_s
        else:
            times.decode_s += output.times.forward_s
        model = self.engine.model
        if self.clock is not None and model.products_s:
            self.clock.note_pass(len(output.sampled), model.products_s, has_head=model.had_head)

    def _finish(self, output: StepOutput, allocator: BlockAllocator) -> None:
        assert not output.failed, "the model's logits are not numbers"
        for token in output.sampled:
            running = self._running[token.request_id]
            running.num_generated += 1
            if running.num_generated == running.output_len:
                self.engine.remove_sequence(token.request_id)
                allocator.free(running.block_ids)
                del self._running[token.request_id]


def _check_context(config: ModelConfig, spec: EngineBenchmarkSpec) -> None:
    if spec.max_context_len > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ConfigError(f"workload needs {spec.max_context_len} tokens of context, the model has {limit}.")


def _result(
    spec: EngineBenchmarkSpec, engine: Engine, measured: _TimedRun, ceilings: Ceilings | None
) -> EngineBenchmarkResult:
    times, wall_s = measured.times, measured.wall_s
    linear_s = measured.linear_s
    num_prompt_tokens = sum(group.num_requests * group.prompt_len for group in spec.groups)
    num_output_tokens = sum(group.num_requests * group.output_len for group in spec.groups)
    forward_s = times.prefill_s + times.decode_s
    return EngineBenchmarkResult(
        model=spec.model,
        dtype=spec.dtype,
        quantization=spec.quantization,
        kv_cache_dtype=spec.cache_dtype,
        device=spec.device,
        attention=spec.attention,
        threads=torch.get_num_threads(),
        tensor_parallel=spec.tensor_parallel,
        num_requests=sum(group.num_requests for group in spec.groups),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=times.num_steps,
        wall_s=wall_s,
        output_tokens_per_s=num_output_tokens / wall_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / wall_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        linear_s=linear_s,
        attention_s=None if linear_s is None else times.attention_s,
        other_forward_s=None if linear_s is None else forward_s - linear_s - times.attention_s,
        sampling_s=times.sampling_s,
        prepare_s=times.prepare_s,
        waiting_s=wall_s - forward_s - times.sampling_s - times.prepare_s,
        gemm_floor_s=None if ceilings is None else ceilings.gemm_floor_s,
        share_of_gemm_floor=None if ceilings is None else ceilings.gemm_floor_s / wall_s,
        weight_reading_s=None if ceilings is None else ceilings.weight_reading_s,
        share_of_weight_reading=None if ceilings is None else ceilings.weight_reading_s / wall_s,
        read_gb_per_s=None if ceilings is None else ceilings.read_bytes_per_s / 1e9,
        outside_forward_share=1.0 - forward_s / wall_s,
        weight_bytes=measured.weight_bytes.num_bytes,
        kv_token_bytes=engine.storage.layout.token_bytes,
        kv_bytes=engine.storage.num_blocks * engine.storage.layout.block_bytes,
        peak_rss_bytes=measured.peak_rss_bytes,
        peak_device_bytes=measured.peak_device_bytes,
    )

"""The engine against transformers on a GPU: the same weights (random, of a 1B Llama) and the same requests.

transformers generates in static batches, with its static cache; each request has an output length of its own, and only
those tokens count, whatever a static batch computes beyond them.
"""

import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from alignedserve.runtime.device.device_work import synchronize
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import WorkloadRun, make_engine
from benchmarks.engine.workloads import RequestGroup, parse_workload
from lab.profiling.model_loading import load_decoder
from lab.profiling.shapes import SHAPES

TARGET = 3.0  # times the best of transformers
OURS, STATIC = "alignedserve", "static batches"
_MISSING = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_LONG_ROUND_S = 5.0


class Setup(NamedTuple):
    """Sizes of the comparison."""

    shape: str
    dtype: str
    requests: tuple[RequestGroup, ...]  # one each
    batch_size: int  # of the static batches
    num_rounds: int


REAL = Setup("llama-3-1b", "bfloat16", parse_workload("w4"), 64, 2)
TOY = Setup("toy", "float32", parse_workload("1x5:3,1x9:2"), 2, 1)


def compare_generation(
    device: torch.device,
    *,
    is_toy: bool,
    on_measured: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Return output tokens per second of each, and what failed; `on_measured` sees them after each."""
    setup = TOY if is_toy else REAL
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = _reference(SHAPES[setup.shape], setup.dtype, device)
        model.save_pretrained(folder)
        contenders = _contenders(model, folder, setup, device)
        for name, run in contenders.items():
            try:
                seconds[name] = _median_seconds(run, setup.num_rounds, device)
            except _MISSING as error:
                failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(name, seconds.get(name, failures.get(name)), flush=True)
            on_measured(_figures(setup, seconds, failures))
    return _figures(setup, seconds, failures)


def _transformers() -> Any:
    """Import transformers here: the other parts of benchmarks.gpu do without it. Weights are random, so nothing is
    fetched, and where nothing can be fetched it would try for minutes."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return importlib.import_module("transformers")


def _figures(setup: Setup, seconds: dict[str, float], failures: dict[str, str]) -> dict[str, Any]:
    transformers = _transformers()
    num_output_tokens = sum(group.output_len for group in setup.requests)
    rates = {name: num_output_tokens / taken for name, taken in seconds.items()}
    others = [rate for name, rate in rates.items() if name != OURS]
    ratio = rates[OURS] / max(others) if OURS in rates and others else None
    return {
        "shape": setup.shape,
        "dtype": setup.dtype,
        "num_requests": len(setup.requests),
        "num_prompt_tokens": sum(group.prompt_len for group in setup.requests),
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": rates,
        "ratio_to_best_transformers": ratio,
        "target": TARGET,
        "is_met": ratio is not None and ratio >= TARGET,
        "left_out": [f"{name}: {reason}" for name, reason in failures.items() if name != OURS],
        "failures": [f"{OURS}: {failures[OURS]}"] if OURS in failures else [],
        "transformers": transformers.__version__,
    }


def _median_seconds(run: Callable[[], None], num_rounds: int, device: torch.device) -> float:
    taken: list[float] = []
    while len(taken) < (2 if taken and taken[0] > _LONG_ROUND_S else num_rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _reference(config: ModelConfig, dtype: str, device: torch.device) -> Any:
    transformers = _transformers()
    assert config.rope is not None, "a Llama rotates"
    llama = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.ties_embeddings,
        bos_token_id=1,
        eos_token_id=list(config.eos_token_ids),
        pad_token_id=0,
    )
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            llama, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return model.eval()


def _contenders(model: Any, folder: str, setup: Setup, device: torch.device) -> dict[str, Callable[[], None]]:
    generator = np.random.default_rng(0)
    vocab_size = SHAPES[setup.shape].vocab_size
    prompts = [generator.integers(3, vocab_size, group.prompt_len).tolist() for group in setup.requests]
    outputs = [group.output_len for group in setup.requests]

    def static() -> None:
        for first in range(0, len(prompts), setup.batch_size):
            part = slice(first, first + setup.batch_size)
            _generate(model, prompts[part], max(outputs[part]), device)

    return {OURS: _ours(folder, setup, device), STATIC: static}


def _ours(folder: str, setup: Setup, device: torch.device) -> Callable[[], None]:
    spec = EngineBenchmarkSpec(
        folder, setup.requests, setup.dtype, device=device.type, max_sequences=len(setup.requests), max_step_tokens=8192
    )
    engine = make_engine(load_decoder(folder, setup.dtype, device.type), spec)
    return lambda: WorkloadRun(engine, spec, spec.groups).run()


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[list[int]], output_len: int, device: torch.device) -> None:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    generated = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        disable_compile=True,
    )
    assert generated.shape[1] == width + output_len, "transformers stopped early"

"""Distance of the roofline from what others have measured, and the time a cost model takes to answer and to learn.

python -m benchmarks.simulation.cost_models
"""

import random
import timeit
from collections.abc import Callable
from itertools import product
from typing import Any

from alignedserve.costmodel.choice import WorkerSpec, make_cost_model
from alignedserve.costmodel.linear import LinearIterationModel, Sample, fit_error
from alignedserve.costmodel.online import GENERIC, OnlineIterationModel
from alignedserve.costmodel.published.llama_layers import MODEL_NAME, MeasuredLayersModel
from alignedserve.costmodel.published.opt_fits import HARDWARE_NAME
from alignedserve.costmodel.published.prompt_tables import table_samples
from alignedserve.costmodel.roofline import RooflineModel
from alignedserve.costmodel.work import IterationWork
from benchmarks.support.recording import write_result

_OPT = (*(("opt-13b", degree) for degree in (1, 2, 4)), *(("opt-66b", degree) for degree in (2, 3, 4, 8)))
_TABLES = (
    ("llama-2-70b", "a100-80g", 2),
    ("llama-2-70b", "a100-80g", 4),
    ("llama-2-70b", "a100-80g", 8),
    ("llama-2-70b", "h100", 2),
    ("llama-2-70b", "h100", 4),
    ("llama-2-70b", "h100", 8),
    ("bloom-176b", "a100-80g", 8),
    ("bloom-176b", "h100", 8),
)
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def main() -> None:
    """Compare, time and record."""
    figures = {
        "roofline_against_fits": [_against_fit(engine, *pair) for engine in ("distserve", "vllm") for pair in _OPT],
        "roofline_against_tables": [_against_table(*key) for key in _TABLES],
        "roofline_layers_against_vidur": [_layers(*key) for key in product(("a100-80g", "h100"), (1, 2, 4, 8))],
        "microseconds": _speeds(),
    }
    for name, rows in figures.items():
        print(name)
        for row in rows if isinstance(rows, list) else [rows]:
            print("  ", row)
    print(write_result("cost_models", figures))


def _against_fit(engine: str, model: str, tensor_parallel: int) -> dict[str, Any]:
    worker = WorkerSpec(model=model, hardware=HARDWARE_NAME, tensor_parallel=tensor_parallel)
    published, roofline = make_cost_model(engine, worker), make_cost_model("roofline", worker)
    errors = {
        kind: _rounded(fit_error(roofline, [Sample(work, published.iteration_s(work)) for work in iterations]))
        for kind, iterations in (("prefill", _prefills()), ("decode", _decodes()))
    }
    return {"fit": engine, "model": model, "tensor_parallel": tensor_parallel, **errors}


def _against_table(model: str, machine: str, tensor_parallel: int) -> dict[str, Any]:
    worker = WorkerSpec(model=model, hardware=machine, tensor_parallel=tensor_parallel)
    roofline, samples = make_cost_model("roofline", worker), table_samples(model, machine, tensor_parallel)
    return {
        "model": model,
        "hardware": machine,
        "tensor_parallel": tensor_parallel,
        "linear_fit": _rounded(fit_error(make_cost_model("splitwise", worker), samples)),
        "prefill": _rounded(fit_error(roofline, [sample for sample in samples if sample.work.num_chunks])),
        "decode": _rounded(fit_error(roofline, [sample for sample in samples if not sample.work.num_chunks])),
    }


def _layers(machine: str, tensor_parallel: int) -> dict[str, Any]:
    worker = WorkerSpec(model=MODEL_NAME, hardware=machine, tensor_parallel=tensor_parallel)
    measured, roofline = make_cost_model("vidur", worker), make_cost_model("roofline", worker)
    assert isinstance(measured, MeasuredLayersModel)
    assert isinstance(roofline, RooflineModel)
    errors = {str(count): round(roofline.layers_s(count) / measured.layers_s(count) - 1.0, 3) for count in _TOKENS}
    return {"hardware": machine, "tensor_parallel": tensor_parallel, "error_by_tokens": errors}


def _prefills() -> list[IterationWork]:
    """Return batches of whole prompts, up to 8 192 tokens."""
    iterations = []
    for num, length in product((1, 4, 16), (64, 128, 256, 512, 1024)):
        work = IterationWork()
        for _ in range(num):
            work.add_chunk(length, 0, is_last=True)
        if work.num_tokens <= 8192:
            iterations.append(work)
    return iterations


def _decodes() -> list[IterationWork]:
    iterations = []
    for num, length in product((1, 8, 32, 64, 128), (128, 512, 1024)):
        work = IterationWork()
        work.add_decodes(num, num * length, length)
        iterations.append(work)
    return iterations


def _rounded(error: Any) -> dict[str, float]:
    return {name: round(value, 3) for name, value in error._asdict().items()}


def _speeds() -> dict[str, float]:
    """Measure one mixed iteration; the best of many short runs, as other processes only add."""
    generator = random.Random(0)
    work = IterationWork()
    work.add_chunk(200, 300, is_last=True)
    for _ in range(32):
        work.add_decode(generator.randint(100, 2000))
    linear, online = LinearIterationModel(GENERIC), OnlineIterationModel()
    roofline, distserve = make_cost_model("roofline"), make_cost_model("distserve")
    return {
        "predict, linear": _microseconds(lambda: linear.iteration_s(work)),
        "predict, online": _microseconds(lambda: online.iteration_s(work)),
        "predict, roofline": _microseconds(lambda: roofline.iteration_s(work)),
        "predict, distserve": _microseconds(lambda: distserve.iteration_s(work)),
        "observe, online": _microseconds(lambda: online.observe(work, 0.02)),
    }


def _microseconds(call: Callable[[], object]) -> float:
    return round(min(timeit.repeat(call, number=50, repeat=200)) / 50 * 1e6, 2)


if __name__ == "__main__":
    main()

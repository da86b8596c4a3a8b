"""Error of what a worker knows of its costs from the start, against the cost model that its measurements came from.

    python -m benchmarks.simulation.learned_costs

Three models of what it measures before it serves (two rounds, nothing scatters): a straight line, a bent one, and what
a worker learns from them, judged on prompts, chunks, decodes and mixtures that are not among them.
"""

import statistics
from typing import NamedTuple

from alignedserve.costmodel.choice import WorkerSpec, make_cost_model
from alignedserve.costmodel.iteration_points import calibration_points
from alignedserve.costmodel.linear import fit_linear
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import learned_from
from alignedserve.costmodel.work import IterationWork
from alignedserve.sim.calibration import calibrated
from benchmarks.support.recording import write_result

MACHINES = (
    ("roofline", WorkerSpec("llama-2-13b", "a100-80g")),
    ("roofline", WorkerSpec("llama-3-8b", "a100-80g")),
    ("roofline", WorkerSpec("llama-3-8b", "h100")),
    ("roofline", WorkerSpec("llama-2-70b", "h100", 4)),
    ("vidur", WorkerSpec("llama-2-7b", "a100-80g")),
    ("vidur", WorkerSpec("llama-2-7b", "h100")),
    ("distserve", WorkerSpec("opt-13b", "a100-80g")),
)
DURATION_S = 2.0


class Error(NamedTuple):
    """|predicted / true - 1| over all judged iterations, and the largest in its direction."""

    mean: float
    extreme: float


def judged_work() -> list[IterationWork]:
    """Return prompts whole and in chunks, decodes, and both."""
    works = [_work(chunk=(length, 0)) for length in (32, 100, 200, 300, 400, 600, 800, 1000, 1500, 2000)]
    works += [_work(chunk=(512, cached)) for cached in (512, 1024, 1536)]
    works += [_work(num, length) for num in (4, 16, 64, 128, 200) for length in (100, 500, 1500)]
    return works + [_work(num, 500, (length, 0)) for num in (8, 32, 100) for length in (64, 200, 500, 1000)]


def _work(num_decodes: int = 0, context_len: int = 0, chunk: tuple[int, int] | None = None) -> IterationWork:
    work = IterationWork()
    if num_decodes:
        work.add_decodes(num_decodes, num_decodes * context_len, context_len)
    if chunk is not None:
        work.add_chunk(*chunk, is_last=True)
    return work


def error_of(model: CostModel, true: CostModel) -> Error:
    """Compare two models."""
    errors = [model.iteration_s(work) / true.iteration_s(work) - 1.0 for work in judged_work()]
    return Error(statistics.fmean(map(abs, errors)), max(errors, key=abs))


def main() -> None:
    """Print and record."""
    points = calibration_points(max_requests=256, max_tokens=2048, has_hidden_cache=False)
    figures = {}
    for source, worker in MACHINES:
        true = make_cost_model(source, worker)
        measured = calibrated(true, points, DURATION_S)
        iterations = [sample for sample in measured if not sample.work.is_empty]
        models: dict[str, CostModel] = {
            "straight": fit_linear(iterations, bends=()),
            "bent": fit_linear(iterations),
            "learned": learned_from(measured),
        }
        name = f"{source}, {worker.shape.name} x {worker.tensor_parallel}, {worker.hardware}"
        figures[name] = {kind: error_of(model, true)._asdict() for kind, model in models.items()}
        print(name, {kind: f"{error['mean']:.1%} {error['extreme']:+.0%}" for kind, error in figures[name].items()})
    print(write_result("learned_costs", figures))


if __name__ == "__main__":
    main()

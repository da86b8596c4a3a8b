"""What cost models say of every iteration of an 8B shape that was timed on an H100: predicted by measured.

    python -m benchmarks.gpu.predicted

Of the data sheet: `roofline` and `calibrated`, as `simulate` and `plan` have them, and the ledger's estimate where it
has the step. Of the measured iterations themselves: the linear model fitted to them, which is written as a profile for
`--costs fitted:FILE`, and its errors on every other iteration where it is fitted to the rest. Writes the record, the
profile, and the table of docs/costmodels.md.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import FitError, fit_error, fit_linear
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.work import IterationWork
from benchmarks.gpu.estimates import GPUS, step_seconds
from benchmarks.gpu.ledger import ledger
from benchmarks.gpu.ledger.forms import DENSE, LONG, PROMPT
from benchmarks.gpu.timed_iterations import KINDS, TimedIteration, figures_of, timed_iterations
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import RESULTS, read_figures, write_result
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.profile_file import MachineProfile

PAGE = Path(__file__).parents[2] / "docs" / "costmodels.md"
FOLDER = RESULTS / "gpu"
PROFILE = FOLDER / "h100_llama-3-8b.json"
NAME, TABLE = "gpu/predicted", "predicted on an H100"
SERVED_SHAPE = replace(model_shape("llama-3-8b"), dtype="bfloat16")
SHEET, LEDGER, FITTED = ("roofline", "calibrated"), "ledger", "fitted"

_COPY_LATENCY_S = 10e-6  # as of PCIe by the data sheet; single copies were not timed
_LEDGER_STEPS = {(64, 2048): LONG.name, (0, 4096): PROMPT.name}  # decodes and their context, or a prompt's tokens

Predict = Callable[[TimedIteration], float | None]


def fitted_profile(folder: Path) -> MachineProfile:
    """Return the machine as fitted to all that was timed; copies at the rate between host and GPU."""
    ceilings = figures_of(folder, "iterations")["ceilings"]
    bytes_per_s = 1e9 * min(ceilings["host_to_device_gb_per_s"], ceilings["device_to_host_gb_per_s"])
    costs = fit_linear([one.sample for one in timed_iterations(folder)])
    return MachineProfile(SERVED_SHAPE, costs.coefficients, LinkModel(_COPY_LATENCY_S, bytes_per_s))


def held_out_error(iterations: Sequence[TimedIteration]) -> FitError:
    samples = [one.sample for one in iterations]
    return fit_error(fit_linear(samples[::2]), samples[1::2])


def predictions(folder: Path) -> dict[str, Predict]:
    models = {name: make_cost_model(name, WorkerSpec(SERVED_SHAPE, "h100")) for name in SHEET}
    models[FITTED] = fitted_profile(folder).cost_model()
    steps = ledger.read()[DENSE.name]

    def of_ledger(one: TimedIteration) -> float | None:
        name = _LEDGER_STEPS.get(_size(one.point.work))
        return None if name is None else step_seconds(steps[name], GPUS[0])

    by_model: dict[str, Predict] = {
        name: lambda one, costs=costs: costs.iteration_s(one.point.work)  # type: ignore[misc]
        for name, costs in models.items()
    }
    return {**by_model, LEDGER: of_ledger}


def _size(work: IterationWork) -> tuple[int, int]:
    return work.num_decodes, work.num_prompt_tokens or work.max_decode_context_len


def predicted(folder: Path) -> dict[str, Any]:
    iterations, by_name = timed_iterations(folder), predictions(folder)
    rows = [
        {
            "kind": one.kind,
            "decodes": one.point.work.num_decodes,
            "prompt_tokens": one.point.work.num_prompt_tokens,
            "measured_s": one.seconds,
            "predicted_s": {
                name: seconds for name, predict in by_name.items() if (seconds := predict(one)) is not None
            },
        }
        for one in iterations
    ]
    kinds = {kind: _kind([row for row in rows if row["kind"] == kind], by_name) for kind in KINDS}
    return {"kinds": kinds, "held_out": held_out_error(iterations)._asdict(), "rows": rows}


def _kind(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"iterations": len(rows), "measured_ms": _ends([1e3 * row["measured_s"] for row in rows])}
    for name in names:
        ratios = [row["predicted_s"][name] / row["measured_s"] for row in rows if name in row["predicted_s"]]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
            found[name] = {"median": statistics.median(ratios), "worst": worst}
    return found


def _ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def table(figures: dict[str, Any]) -> str:
    columns = (*SHEET, LEDGER, FITTED)
    head = f"| predicted by measured: median, worst | | ms | {' | '.join(f'`{name}`' for name in columns)} |\n"
    rows = [head, "|---" * (3 + len(columns)) + "|\n"]
    for kind, own in figures["kinds"].items():
        least, most = (f"{value:.1f}" for value in own["measured_ms"])
        cells = [_cell(own.get(name)) for name in columns]
        span = least if least == most else f"{least} to {most}"
        rows.append(f"| {kind} | {own['iterations']} | {span} | {' | '.join(cells)} |\n")
    return "".join(rows)


def _cell(ratios: dict[str, float] | None) -> str:
    return "" if ratios is None else f"{ratios['median']:.2f}, {ratios['worst']:.2f}"


def with_table(page: str) -> str:
    return put_table(page, TABLE, table(read_figures(NAME)))


def profile_document(folder: Path) -> dict[str, Any]:
    iterations, profile = timed_iterations(folder), fitted_profile(folder)
    costs = profile.cost_model()
    by_kind = {kind: [one.sample for one in iterations if one.kind == kind] for kind in KINDS}
    record = json.loads((folder / "gpu_iterations.json").read_text())
    machine = {name: record["machine"][name] for name in ("gpus", "driver", "cuda", "torch", "triton")}
    return {
        **profile.as_fields(),
        "measured_at": record["measured_at"],
        "command": "python -m benchmarks.gpu.predicted",
        "machine": machine,
        "errors": {kind: fit_error(costs, samples)._asdict() for kind, samples in by_kind.items()},
        "held_out": held_out_error(iterations)._asdict(),
        "num_samples": len(iterations),
    }


def main() -> None:
    """Predict, write all three, and print the table."""
    parser_of(__doc__).parse_args()
    figures = predicted(FOLDER)
    write_result(NAME, figures)
    PROFILE.write_text(json.dumps(profile_document(FOLDER), indent=2) + "\n")
    print(table(figures))
    print("held out:", figures["held_out"])
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

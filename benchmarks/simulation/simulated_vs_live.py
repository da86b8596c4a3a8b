"""Distance of the simulator from the live system: fitted on one load, judged on others.

    python -m benchmarks.simulation.simulated_vs_live [--topology colocated|elastic|disaggregated]
        [--model pocket|opt-125m|smollm2] [--rounds N] [--duration S] [--folder DIR]
    python -m benchmarks.simulation.simulated_vs_live --page    # only the table of docs/replay.md, from the records

Serves and puts three loads on in turn, N times: `fit`, and two of another rate and of other lengths, which are judged.
The same load is the same requests every time. In turn, because the machine is not the same from one minute to the next:
so all loads see all of its states. By how much a load differs from itself, in the even and the odd rounds, stands
beside by how much the simulation differs from it. Every decision is checked. With --folder the recording stays, and one
that is there is not made again: simulated and compared only. Nothing else should compute meanwhile: the load average of
the machine stands in the result.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.cli.wiring import start_cluster
from alignedserve.config.model_settings import load_models
from alignedserve.core.metrics import describe
from alignedserve.runtime.model.named_models import pocket_folder, smollm2_file
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from lab.commands.bench.options import LoadOptions
from lab.commands.bench.serve import bench_serve
from lab.commands.simulation.replay import ComponentCheck, replay_folder
from lab.replay.component_replay import read_run_metadata
from lab.replay.fitting import MachineFit, fit_machine
from lab.replay.observed import ObservedIteration, ObservedRun
from lab.replay.simulated import (
    Comparison,
    ReplayedRequest,
    SimulatedMachine,
    compare,
    fitted_machine,
    measures_of,
    requests_of,
    think_times_s,
)

RT = "rt: rate={rate}, prompt={prompt}, output=exponential({output}), max_output=200, ttft=0.4, tpot=0.2"
BE = "be: outstanding={outstanding}, prompt=uniform({shortest},{longest}), output=uniform(32,128), tier=flex"
FITTED = "fit"
THROUGHPUT, TIMES = 0.05, 0.10  # what the ratios of throughput and of times may be off
JUDGED = ("requests/s", "ttft p50, s", "ttft p90, s", "tbt p50, s", "tbt p90, s")
PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
SHAPES = [(model, topology) for model in ("pocket", "opt-125m", "smollm2") for topology in ("elastic", "colocated")]
_HEAD = "| shape | load | requests | throughput | TTFT p50, p90 | TBT p50, p90 | the live system by itself |"
BE_CLASS = "be"
RUN, WINDOWS = "run", "windows.json"
SLICE_S = 5.0
Window = tuple[float, float, float, float]  # begin, end, and the load averages of the machine then


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """One load: real-time requests at a rate, best-effort ones in a closed loop."""

    rate: float
    prompt: str
    output: int
    outstanding: int
    shortest: int
    longest: int

    @property
    def line(self) -> str:
        return "; ".join(part.format(**asdict(self)) for part in (RT, BE))


LOADS = {
    FITTED: RecordedLoad(1.5, "lognormal(100,300)", 60, 4, 200, 500),
    "rate": RecordedLoad(2.25, "lognormal(100,300)", 60, 2, 200, 500),
    "lengths": RecordedLoad(1.0, "lognormal(200,500)", 30, 3, 400, 700),
}


def record_run(folder: Path, overrides: list[str], tokenizer: Path, num_rounds: int, duration_s: float) -> None:
    """Serve, put the loads on in turn, and leave the recording in RUN of `folder` and when each load was on in WINDOWS.
    In a process of its own: a process can start one Ray cluster."""
    run = json.dumps(str(folder / RUN))
    windows: dict[str, list[Window]] = {name: [] for name in LOADS}
    settings = load_models(None, [*overrides, "batches.enabled=false", f"recording.folder={run}"], ())
    with start_cluster(settings) as cluster:
        cluster.wait_ready(120.0)
        for number, (seed, name) in itertools.product(range(num_rounds), enumerate(LOADS, 1)):
            options = LoadOptions(
                url=cluster.url,
                endpoint="completions",
                synthetic=LOADS[name].line,
                duration_s=duration_s,
                ignore_eos=True,
                tokenizer=tokenizer,
                seed=seed,
                json_target=str(folder / f"{name}.{number}.json"),
            )
            begin_s, load_average = time.monotonic(), os.getloadavg()[0]
            bench_serve(options)
            windows[name].append((begin_s, time.monotonic(), load_average, os.getloadavg()[0]))
    (folder / WINDOWS).write_text(json.dumps(windows))


def judged(comparisons: Sequence[Comparison]) -> dict[str, bool]:
    within = {}
    for one in comparisons:
        if one.class_name == "all" and one.measure in JUDGED and one.ratio is not None:
            bound = THROUGHPUT if one.measure == "requests/s" else TIMES
            within[one.measure] = abs(one.ratio - 1.0) <= bound
    return within


def record(arguments: argparse.Namespace, folder: Path) -> None:
    if (folder / WINDOWS).exists():
        return
    overrides = [f"topology={arguments.topology}", f"scheduling.policy={arguments.policy}"]
    overrides += ["decode.count=2"] if arguments.topology == "elastic" else []
    model = pocket_folder()
    if arguments.model == "smollm2":
        model = smollm2_file()
        overrides += [f"model.path={model}", "model.served_model_name=smollm2"]
    if arguments.model == "opt-125m":
        model = folder / "model"
        model = model if model.exists() else make_opt_125m(model)
        overrides += [f"model.path={model}", "model.random_weights=true", "model.dtype=bfloat16"]
    if arguments.model != "pocket":
        overrides += [f"decode.kv_cache_bytes={1 << 30}"]
    if arguments.model != "pocket" and arguments.topology == "disaggregated":
        overrides += [f"pool.memory_bytes={1 << 30}"]
        overrides += [f"prefill.{field}_bytes={1 << 29}" for field in ("kv_cache", "candidate_buffer")]
    process = multiprocessing.get_context("spawn").Process(
        target=record_run, args=(folder, overrides, model, arguments.rounds, arguments.duration)
    )
    process.start()
    process.join()
    assert process.exitcode == 0, "the run failed"


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    record(arguments, folder)
    if arguments.only_record:
        return {}
    checks, run = replay_folder(folder / RUN)
    metadata = read_run_metadata(folder / RUN)
    windows = msgspec.json.decode((folder / WINDOWS).read_bytes(), type=dict[str, list[Window]])
    fitted = run.within(*(window[:2] for window in windows[FITTED]))
    fit = fit_machine(fitted, metadata.layout.block_bytes)
    machine = fitted_machine(metadata, fit)
    think_s = think_time_of([run.within(window[:2]) for window in windows[FITTED]])
    runs = {}
    for name, of_load in windows.items():
        rounds = [run.within(window[:2]) for window in of_load]
        runs[name] = compared(rounds, name, machine, fit, think_s, num_runs=arguments.draws)
        runs[name]["load_average_before_and_after"] = [window[2:] for window in of_load]
    return {
        "topology": arguments.topology,
        "model": arguments.model,
        "policy": arguments.policy,
        "rounds": arguments.rounds,
        "seconds": arguments.duration,
        "within_bounds": {name: run["within_bounds"] for name, run in runs.items()},
        "decisions": [_decisions(check) for check in checks],
        "runs": runs,
        "fit": {
            "decode": fit.decode.error._asdict() | {"coefficients": asdict(fit.decode.costs.coefficients)},
            "prefill": fit.prefill.error._asdict() if fit.prefill else None,
            "slowdowns": fit.slowdowns._asdict(),
            "links": asdict(fit.links) | {"submit_times_s": described(fit.links.submit_times_s)},
            "unmeasured": asdict(fit.unmeasured.coefficients),
            "think_s": think_s,
        },
    }


def think_time_of(fitted: Sequence[ObservedRun]) -> dict[str, float]:
    found = [think_times_s(requests_of(one), {BE_CLASS: LOADS[FITTED].outstanding})[BE_CLASS] for one in fitted]
    return {BE_CLASS: statistics.fmean(found)}


def compared(
    observed: Sequence[ObservedRun],
    name: str,
    machine: SimulatedMachine,
    fit: MachineFit,
    think_s: Mapping[str, float],
    *,
    num_runs: int,
) -> dict[str, Any]:
    rounds = [requests_of(one) for one in observed]
    comparisons = compare(rounds, {BE_CLASS: LOADS[name].outstanding}, machine, think_s, num_runs)
    return {
        "load": LOADS[name].line,
        "num_requests": sum(map(len, rounds)),
        "within_bounds": judged(comparisons),
        "measures": [asdict(one) | {"ratio": one.ratio} for one in comparisons],
        "odd_by_even_rounds": itself(rounds),
        "iterations": [iterations_of(one, fit) for one in observed],
        "measured_by_fitted": [slices_of(one, fit) for one in observed],
    }


def itself(rounds: Sequence[Sequence[ReplayedRequest]]) -> dict[str, float]:
    """Return the ratios of the real measures of all requests in the odd rounds to those in the even ones."""
    if len(rounds) < 2:
        return {}
    even, odd = measures_of(rounds[::2]), measures_of(rounds[1::2])
    return {name: odd[kind, name] / even[kind, name] for kind, name in even if kind == "all" and name in JUDGED}


def fitted_s(iteration: ObservedIteration, fit: MachineFit) -> float:
    is_prefill = fit.prefill is not None and iteration.worker.startswith("prefill")
    costs = (fit.prefill if is_prefill and fit.prefill else fit.decode).costs
    return costs.iteration_s(iteration.work)


def iterations_of(run: ObservedRun, fit: MachineFit) -> dict[str, Any]:
    kinds: dict[str, list[tuple[float, float]]] = {}
    for one in run.iterations:
        kind = "decodes" if not one.work.num_chunks else "prompts" if not one.work.num_decodes else "both"
        kinds.setdefault(kind, []).append((one.seconds, fitted_s(one, fit)))
    return {
        kind: {
            "count": len(times),
            "measured_s": sum(measured for measured, _ in times),
            "fitted_s": sum(expected for _, expected in times),
            "ratio_p50": statistics.median(measured / expected for measured, expected in times),
        }
        for kind, times in sorted(kinds.items())
    }


def slices_of(run: ObservedRun, fit: MachineFit) -> dict[str, list[float | None]]:
    begin_s = min(one.started_s for one in run.iterations)
    num_slices = int((max(one.started_s for one in run.iterations) - begin_s) / SLICE_S) + 1
    sums = {kind: [[0.0, 0.0] for _ in range(num_slices)] for kind in ("decodes", "prompts")}
    for one in run.iterations:
        of_slice = sums["prompts" if one.work.num_chunks else "decodes"][int((one.started_s - begin_s) / SLICE_S)]
        of_slice[0] += one.seconds
        of_slice[1] += fitted_s(one, fit)
    return {
        kind: [round(measured / fitted, 3) if fitted else None for measured, fitted in slices]
        for kind, slices in sums.items()
    }


def described(times_s: Sequence[float]) -> dict[str, Any]:
    summary = describe(times_s)
    return asdict(summary) if summary is not None else {}


def _decisions(check: ComponentCheck) -> dict[str, Any]:
    per_s = round(check.num_equal / check.seconds) if check.seconds else None
    return {
        "room": check.component,
        "equal": check.num_equal,
        "differs": check.difference is not None,
        "events_per_s": per_s,
    }


def table() -> str:
    """Return the table: a row for each judged load of each shape that was recorded in rounds."""
    rows = [f"| {', '.join(shape)} | {load} | {_cells(run)} |" for shape, load, run in _judged_runs()]
    return "\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *rows]) + "\n"


def range_of(*measures: str) -> tuple[float, float]:
    ratios = [
        row["ratio"]
        for _, _, run in _judged_runs()
        for row in run["measures"]
        if row["class_name"] == "all" and row["measure"] in measures
    ]
    return round(min(ratios), 2), round(max(ratios), 2)


def _judged_runs() -> Iterator[tuple[tuple[str, str], str, Mapping[str, Any]]]:
    for shape in SHAPES:
        figures = read_figures(f"simulation/simulated_vs_live_{'_'.join(shape)}")
        if figures is not None and "rounds" in figures:
            yield from ((shape, load, figures["runs"][load]) for load in LOADS if load != FITTED)


def with_table(page: str) -> str:
    return put_table(page, "simulated against live", table())


def _cells(run: Mapping[str, Any]) -> str:
    ratios = {row["measure"]: row["ratio"] for row in run["measures"] if row["class_name"] == "all"}
    shown = {name: _shown(ratios.get(name), run["within_bounds"].get(name, True)) for name in JUDGED}
    itself = run["odd_by_even_rounds"]
    by_itself = ", ".join(f"{itself[name]:.2f}" for name in JUDGED if name in itself) or "one round"
    ttft, tbt = (", ".join(shown[f"{kind} p{percent}, s"] for percent in (50, 90)) for kind in ("ttft", "tbt"))
    return f"{run['num_requests']} | {shown[JUDGED[0]]} | {ttft} | {tbt} | {by_itself}"


def _shown(ratio: float | None, is_within: bool) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if is_within else f"**{ratio:.2f}**"


def main() -> None:
    """Print and record."""
    parser = parser_of(__doc__, rounds=4)
    parser.add_argument("--topology", choices=("colocated", "elastic", "disaggregated"), default="colocated")
    parser.add_argument("--model", choices=("pocket", "opt-125m", "smollm2"), default="pocket")
    parser.add_argument("--policy", default="aligned_slo")
    parser.add_argument("--duration", type=float, default=10.0, help="of a load in a round")
    parser.add_argument("--draws", type=int, default=2, help="of the jitter, for each round")
    parser.add_argument("--folder", type=Path, help="where recordings stay")
    parser.add_argument("--suffix", default="", help="of the result's name: the state of the machine")
    parser.add_argument("--only-record", action="store_true", help="compare later, with the same --folder")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(with_table(PAGE.read_text()))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(arguments, folder)
    if arguments.only_record:
        return
    for name, run in figures["runs"].items():
        print(name, {one["measure"]: round(one["ratio"], 3) for one in run["measures"] if one["class_name"] == "all"})
        print("  odd by even rounds", {key: round(ratio, 3) for key, ratio in run["odd_by_even_rounds"].items()})
    parts = ("simulation/simulated_vs_live", arguments.model, arguments.topology, arguments.suffix)
    named = ("model", "topology", "policy", "rounds", "duration", "draws")  # not where the recording lies
    command = " ".join(f"--{name} {getattr(arguments, name)}" for name in named)
    command = f"python -m benchmarks.simulation.simulated_vs_live {command}"
    print(write_result("_".join(filter(None, parts)), figures, command=command))


if __name__ == "__main__":
    main()

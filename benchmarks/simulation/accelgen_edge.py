"""AccelGen at its edge: chat beside documents, live and recorded, then simulated with what the live worker knew.

    python -m benchmarks.simulation.accelgen_edge [--runs N] [--duration S] [--folder DIR]

The load and settings of benchmarks.scheduling.live_policies, one colocated worker, started anew for each run. AccelGen
asks its cost model once, before the first iteration, how many tokens a second the worker computes, and keeps the answer
(the pivot); it is worth as much as the second of calibration before it. Each run is simulated with the same requests:
as it was; with a calibration at the costs under load; and with all that the worker measured, or all that iterations
take, longer or shorter by some percent. With --folder recordings stay, and those that are there are not made again.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.cli.commands.replay import replay_folder
from alignedserve.core.request import RequestClass
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import learned_from
from alignedserve.costmodel.work import IterationWork
from alignedserve.replay.fitting import fit_machine
from alignedserve.replay.observed import ObservedRequest, ObservedRun
from alignedserve.replay.run_file import read_run_metadata
from alignedserve.replay.simulated import (
    SimulatedMachine,
    WorkerCosts,
    fitted_machine,
    real_classes,
    requests_of,
    simulate,
    simulation_of,
)
from alignedserve.scheduling.factory import calibration_s, limits_of
from alignedserve.scheduling.policies.accelgen_urgency import AccelgenConfig, Pivot, find_pivot
from alignedserve.sim.calibration import calibrated, points_of
from alignedserve.workload.requests import ClosedLoop, TimedRequest, Workload, WorkloadDescription
from benchmarks.scheduling.live_policies import BEST_EFFORT, REAL_TIME, load, make_model, served
from benchmarks.support.recording import write_result

POLICY, TOPOLOGY, WORKER = "accelgen", "colocated", "worker-0"
OUTSTANDING = 64  # of BEST_EFFORT
TPOT_S = 0.2  # of REAL_TIME
WINDOW = "window.json"
NUM_DRAWS = 2
PERCENTS = (-40, -30, -20, -10, -1, 1, 10, 25, 50)


class Run(NamedTuple):
    """One live run: the part of it under load, and a machine fitted to it that knows what its worker knew."""

    observed: ObservedRun
    machine: SimulatedMachine
    duration_s: float


def record(folder: Path, model: Path, duration_s: float) -> None:
    """Serve, and put the load on for so long; leaves the recording in `folder`."""
    with served(model, POLICY, TOPOLOGY, folder) as port:
        load(port, model, [REAL_TIME], 10.0)
        begin_s = time.monotonic()
        load(port, model, [REAL_TIME, BEST_EFFORT], duration_s)
        window = [begin_s, time.monotonic(), duration_s]
    (folder / WINDOW).write_text(json.dumps(window))


def read(folder: Path) -> Run:
    """Read a recording, check its decisions, and fit costs to what ran under load."""
    checks, run = replay_folder(folder)
    assert all(check.difference is None for check in checks), "recorded with another policy"
    begin_s, end_s, duration_s = json.loads((folder / WINDOW).read_text())
    metadata, observed = read_run_metadata(folder), run.within((begin_s, end_s))
    return Run(observed, fitted_machine(metadata, fit_machine(observed, metadata.layout.block_bytes)), duration_s)


def workload_of(run: Run) -> Workload:
    """Return the requests of a run as its client sent them, with answers as long as their limits: it ignored ends."""
    observed = sorted(run.observed.requests.values(), key=lambda one: one.request.arrival_s)
    begin_s = observed[0].request.arrival_s
    timed = [_timed(one, begin_s) for one in observed]
    documents = tuple(one for one in timed if one.request_class is RequestClass.BEST_EFFORT)
    chats = tuple(one for one in timed if one.request_class is not RequestClass.BEST_EFFORT)
    loop = ClosedLoop("be", OUTSTANDING, is_wave=False, stream=_Again(documents))
    return Workload(WorkloadDescription("recorded", 0), chats, (loop,), ends_s=run.duration_s)


def _timed(observed: ObservedRequest, begin_s: float) -> TimedRequest:
    request = observed.request
    predicted_len = observed.predicted_len
    return TimedRequest(
        arrival_s=request.arrival_s - begin_s,
        prompt_len=request.prompt_len,
        output_len=request.sampling.max_tokens,
        max_tokens=request.sampling.max_tokens,
        class_name=request.request_class.value,
        request_class=request.request_class,
        slo=request.slo,
        priority=request.priority,
        predicted_len=None if predicted_len is None else round(predicted_len),
    )


class _Again:
    """Documents in their order, and again from the first."""

    def __init__(self, documents: tuple[TimedRequest, ...]) -> None:
        self._documents = documents

    def __getitem__(self, number: int) -> TimedRequest:
        return replace(self._documents[number % len(self._documents)], arrival_s=0.0)


class _Scaled:
    """A cost model times a factor."""

    def __init__(self, costs: CostModel, factor: float) -> None:
        self._costs, self._factor = costs, factor

    def iteration_s(self, work: IterationWork) -> float:
        """See CostModel."""
        return self._factor * self._costs.iteration_s(work)

    def swap_s(self, num_tokens: float) -> float:
        """See CostModel."""
        return self._factor * self._costs.swap_s(num_tokens)


def calibrated_under_load(machine: SimulatedMachine) -> tuple[Sample, ...]:
    """Return what a simulated worker measures before it serves: at the costs that iterations have under load."""
    config = simulation_of(machine, 0)
    decode = machine.cluster.decode
    num_blocks = machine.layout.blocks_in(decode.kv_cache_bytes)
    points = points_of(machine.layout, limits_of(decode), num_blocks=num_blocks, has_hidden_cache=False)
    return calibrated(config.decode_costs, points, calibration_s(machine.cluster.engine, machine.cluster.scheduling))


def measured_times(measured: Mapping[str, tuple[Sample, ...]], factor: float) -> dict[str, tuple[Sample, ...]]:
    """Return measurements with every time multiplied."""
    return {
        name: tuple(Sample(one.work, factor * one.seconds) for one in samples) for name, samples in measured.items()
    }


def pivot_of(measured: tuple[Sample, ...]) -> Pivot:
    """Return what AccelGen takes the worker's speed to be after these measurements."""
    return find_pivot(learned_from(measured), AccelgenConfig())


def simulated(run: Run, machine: SimulatedMachine) -> dict[str, Any]:
    """Return means over draws of the jitter: the share of chats that hold both objectives, their TPOT, documents."""
    workload = workload_of(run)
    results = [simulate(workload, machine, seed) for seed in range(NUM_DRAWS)]
    held = [attained for result in results if (attained := result["rt"].attainment) is not None]
    tpot = [result["rt"].tpot_s for result in results]
    return {
        "held": round(statistics.fmean(held), 3),
        "held_each": [round(share, 3) for share in held],
        "tpot_p50_s": round(statistics.fmean(one.distribution.p50 for one in tpot if one is not None), 4),
        "documents_per_s": round(statistics.fmean(result["be"].loaded_requests_per_s for result in results), 3),
    }


def examine(run: Run) -> dict[str, Any]:
    """Return a live run beside its simulations."""
    machine, duration_s = run.machine, run.duration_s
    live = real_classes(requests_of(run.observed))
    documents = [one.timed for one in requests_of(run.observed) if one.timed.request_class is RequestClass.BEST_EFFORT]
    pivot = pivot_of(machine.measured[WORKER])
    under_load = {WORKER: calibrated_under_load(machine)}
    figures: dict[str, Any] = {
        "live": {
            "held": live["rt"].attainment,
            "tpot_p50_s": live["rt"].tpot_s and live["rt"].tpot_s.distribution.p50,
            "documents_per_s": live["be"].num_by_ending["completed"] / duration_s,
        },
        "pivot_live": pivot._asdict() | {"budget": pivot.rate * TPOT_S},
        "pivot_calibrated_under_load": pivot_of(under_load[WORKER])._asdict(),
        "documents_longer_than_budget": sum(one.prompt_len > pivot.rate * TPOT_S for one in documents) / len(documents),
        "simulated": simulated(run, machine),
        "simulated, calibrated under load": simulated(run, replace(machine, measured=under_load)),
    }
    for percent in PERCENTS:
        factor = 1.0 + percent / 100
        known = replace(machine, measured=measured_times(machine.measured, factor))
        scaled = WorkerCosts(_Scaled(machine.decode.costs, factor), machine.decode.ratios)
        figures[f"known times {percent:+} %"] = simulated(run, known)
        figures[f"true times {percent:+} %"] = simulated(run, replace(machine, decode=scaled))
    return figures


def main() -> None:
    """Record, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=40.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where recordings stay")
    parser.add_argument("--suffix", default="", help="of the result's name: the state of the machine")
    parser.add_argument("--only-record", action="store_true", help="simulate later, with the same --folder")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"duration_s": arguments.duration, "real_time": REAL_TIME, "best_effort": BEST_EFFORT}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "opt-125m"
        if not model.exists():
            make_model(model)
        for number in range(arguments.runs):
            run = folder / f"run-{number}"
            if not (run / WINDOW).exists():
                record(run, model, arguments.duration)
            if not arguments.only_record:
                figures[run.name] = examine(read(run))
                print(run.name, json.dumps(figures[run.name], indent=1), flush=True)
    if not arguments.only_record:
        command = f"--runs {arguments.runs} --duration {arguments.duration:g}"  # not where the recordings lie
        command = f"python -m benchmarks.simulation.accelgen_edge {command}"
        print(write_result("accelgen_edge" + arguments.suffix, figures, command=command))


if __name__ == "__main__":
    main()

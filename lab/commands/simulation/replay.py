"""`alignedserve replay`: a recorded run decided again, and simulated."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from alignedserve.cli.console import FAILURE, notes, printable, results, to_json, write_json
from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError, RecordingError
from alignedserve.core.request import RequestClass
from alignedserve.process.recording import RecordedPart
from alignedserve.scheduling.factory import topology_of
from lab.commands.simulation.options import ReplayOptions
from lab.costmodel.choice import FITTED, make_cost_model
from lab.replay.component_replay import ComponentReplay, Difference, read_part, read_run_metadata, recordings_in
from lab.replay.fitting import MachineFit, WorkerFit, fit_machine
from lab.replay.observed import ObservedRun
from lab.replay.simulated import (
    OTHERS,
    Comparison,
    WorkerCosts,
    compare,
    fitted_machine,
    requests_of,
    think_times_s,
)

_MAX_SHOWN = 4000  # characters of one side of a difference
_MANY_ZEROS = re.compile(r"\b0(, 0){7,}\b")  # a prompt without its tokens


@dataclass(frozen=True, slots=True)
class ComponentCheck:
    """One file, replayed."""

    component: str
    file: str  # in the folder of the run
    num_equal: int
    ending: str  # closed, limit, cut or unfinished
    seconds: float
    difference: Difference | None
    part: RecordedPart | None = None  # of another node than the first


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """The simulation beside the run."""

    costs_from: str
    is_fitted: bool  # or these are costs of `alignedserve profile`
    topology: Topology
    num_requests: int
    num_others: int
    fit: MachineFit
    comparisons: list[Comparison]


def replay(options: ReplayOptions) -> int:
    outstanding = parse_outstanding(options.outstanding)
    with notes().status("Deciding again …"):
        checks, run = replay_folder(options.folder, options.component)
    is_equal = all(check.difference is None for check in checks)
    times = None
    if options.is_simulated and options.component is None and is_equal:
        with notes().status("Simulating …"):
            times = simulate_beside(options, run, outstanding)
    if options.json_output:
        write_json(to_json({"rooms": [_plain(check) for check in checks], "simulation": _plain_times(times)}), "-")
    else:
        _print_checks(checks)
        _print_times(times)
    return 0 if is_equal else FAILURE


def replay_folder(folder: Path, component: str | None = None) -> tuple[list[ComponentCheck], ObservedRun]:
    """Decide everything again and return the checks and the observed run. Raises RecordingError."""
    run, checks = ObservedRun(), []
    replays = [ComponentReplay(path) for path in recordings_in(folder)]
    chosen = [room for room in replays if component in (None, room.name)]
    if not chosen:
        raise ConfigError(f"--component {component}: recorded are {', '.join(sorted({room.name for room in replays}))}")
    for room in chosen:
        observer, began_s = run.observer(room.name, room.pool, room.measured), time.perf_counter()
        part = read_part(room.path.parent)
        ahead_s = part.clock_ahead_s if part is not None else 0.0
        for decided in room.decided():
            observer.take(decided._replace(now=decided.now + ahead_s))
        seconds = time.perf_counter() - began_s
        file = str(room.path.relative_to(folder))
        checks.append(ComponentCheck(room.name, file, room.num_equal, room.ending, seconds, room.difference, part))
    run.complete()
    return checks, run


def simulate_beside(options: ReplayOptions, run: ObservedRun, outstanding: Mapping[str, int]) -> SimulatedTimes:
    """Simulate the run with the costs that the options name. Raises RecordingError when it had no request."""
    requests = requests_of(run)
    if not requests:
        raise RecordingError(f"{options.folder} has no request that got a token; --no-simulate leaves it at decisions")
    metadata = read_run_metadata(options.folder)
    source = run if options.fit_on is None else replay_folder(options.fit_on)[1]
    fit = fit_machine(source, metadata.layout.block_bytes)
    machine = fitted_machine(metadata, fit)
    costs_from = "this very run" if options.fit_on is None else str(options.fit_on)
    if options.costs is not None:
        if not options.costs.startswith(FITTED):
            raise ConfigError(f"--costs {options.costs}: must be {FITTED}FILE")
        machine = replace(machine, decode=WorkerCosts(make_cost_model(options.costs)), prefill=None)
        costs_from = f"{options.costs}; links from this very run"
    think_s = think_times_s(requests_of(source), outstanding)
    comparisons = compare([requests], outstanding, machine, think_s)
    num_others = sum(request.timed.class_name == OTHERS for request in requests)
    topology = topology_of(metadata.config)
    return SimulatedTimes(costs_from, options.costs is None, topology, len(requests), num_others, fit, comparisons)


def parse_outstanding(values: Sequence[str]) -> dict[str, int]:
    """Parse CLASS=N of the command line. Raises ConfigError."""
    outstanding = {}
    for value in values:
        name, _, number = value.partition("=")
        if name not in {kind.value for kind in RequestClass} or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--outstanding {value}: must be rt=N or be=N")
        outstanding[name] = int(number)
    return outstanding


def _plain(check: ComponentCheck) -> dict[str, Any]:
    fields = {"room": check.component} | {
        name: getattr(check, name) for name in ("file", "num_equal", "ending", "seconds")
    }
    if check.part is not None:
        fields |= {"node": check.part.node, "is_whole": check.part.is_whole}
    difference = check.difference
    if difference is None:
        return {**fields, "difference": None}
    shown = {name: getattr(difference, name) for name in ("number", "offset", "now", "expected", "got")}
    return {**fields, "difference": {**shown, "event": repr(difference.event)}}


def _plain_times(times: SimulatedTimes | None) -> dict[str, Any] | None:
    if times is None:
        return None
    fit = times.fit
    workers = {"decode": fit.decode, "prefill": fit.prefill} if times.is_fitted else {"decode": None, "prefill": None}
    return {
        "costs_from": times.costs_from,
        "num_requests": times.num_requests,
        "num_others": times.num_others,
        "fit": {name: _plain_fit(worker) for name, worker in workers.items()}
        | {"links": asdict(replace(fit.links, submit_times_s=())), "slowdowns": fit.slowdowns._asdict()},
        "comparisons": [asdict(comparison) | {"ratio": comparison.ratio} for comparison in times.comparisons],
    }


def _plain_fit(worker: WorkerFit | None) -> dict[str, Any] | None:
    if worker is None:
        return None
    return {"coefficients": asdict(worker.costs.coefficients), "error": worker.error._asdict()}


def _print_checks(checks: Sequence[ComponentCheck]) -> None:
    table = Table("component", "recording", "decisions equal", "events/s", "ends", title="Decided again")
    for check in checks:
        per_second = f"{check.num_equal / check.seconds:,.0f}" if check.seconds > 0 else ""
        verdict = f"{check.num_equal:,}" if check.difference is None else f"[red]differs after {check.num_equal:,}[/]"
        table.add_row(check.component, check.file, verdict, per_second, _ENDINGS.get(check.ending, check.ending))
    results().print(table)
    for part in dict.fromkeys(check.part for check in checks if check.part is not None and not check.part.is_whole):
        line = (
            f"{part.node} on {part.hostname} ({part.address}) was lost or its end is missing: what follows is not here"
        )
        results().print(line, markup=False, soft_wrap=True)
    for check in checks:
        if check.difference is not None:
            _print_difference(check, check.difference)


_ENDINGS = {
    "closed": "with the component",
    "limit": "at recording.max_bytes",
    "cut": "in the middle of a decision: its process was killed",
    "unfinished": "between two decisions: its process was killed",
}


def _print_difference(check: ComponentCheck, difference: Difference) -> None:
    expected = "only a digest was recorded (recording.commands keeps more)"
    lines = [
        f"{check.file}: event {difference.number} at byte {difference.offset}, now = {difference.now!r}",
        f"  event     {_shown(difference.event)}",
        f"  recorded  {expected if difference.expected is None else _shown(difference.expected)}",
        f"  today     {_shown(difference.got)}",
    ]
    for line in lines:
        results().print(line, markup=False, soft_wrap=True)


def _shown(value: Any) -> str:
    text = _MANY_ZEROS.sub(lambda match: f"0 x {match.group().count('0')}", printable(repr(value)))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"


def _print_times(times: SimulatedTimes | None) -> None:
    if times is None:
        return
    costs = f"costs fitted to {times.costs_from}" if times.is_fitted else f"costs {times.costs_from}"
    table = Table("class", "measure", title=printable(f"Simulated, with {costs}"))
    for name in ("real", "simulated", "ratio"):
        table.add_column(name, justify="right")
    for comparison in times.comparisons:
        ratio = "" if comparison.ratio is None else f"{comparison.ratio:.3f}"
        table.add_row(
            comparison.class_name, comparison.measure, f"{comparison.real:.4g}", f"{comparison.simulated:.4g}", ratio
        )
    results().print(table)
    fit = times.fit
    for name, worker in (("decode" if fit.prefill else times.topology.value, fit.decode), ("prefill", fit.prefill)):
        if worker is not None and times.is_fitted:
            error = f"error {worker.error.median:.1%} median, {worker.error.p90:.1%} p90"
            results().print(f"{worker.error.num_samples} {name} iterations fitted, {error}", markup=False)
    others = f"{times.num_others} of them not compared"
    slowdowns = ", ".join(f"{number:g}" for number in fit.slowdowns)
    machine = f"message {fit.links.message_s:.2g} s, slowdowns {slowdowns}"
    results().print(f"{times.num_requests} requests, {others}; {machine}", markup=False)

"""Runs many simulations, in any number of processes, with results in the order of the cases.

Processes are spawned, so a script that calls `run_cases` guards its main part with `__name__`.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

from alignedserve.core.errors import AlignedServeError
from lab.sim.config import SimConfig
from lab.sim.policies import as_predicted_for
from lab.sim.result import ALL, SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.requests import TimeWindow, Workload, sped_up, window_of


@dataclass(frozen=True, slots=True)
class WorkloadLine:
    """A workload as a line (docs/workloads.md), built in the process that simulates it."""

    line: str
    seed: int = 0
    num_requests: int | None = None
    duration_s: float | None = None  # seconds of arrivals
    data_dir: Path | None = None  # for names that are not part of the package
    window: TimeWindow | None = None  # of the whole, where no more is wanted
    speed: float = 1.0  # of the arrivals in it

    def build(self) -> Workload:
        """Build the requests. Raises ConfigError."""
        whole = _built(replace(self, window=None, speed=1.0))
        return part_of(whole, self.window, self.speed)


def part_of(workload: Workload, window: TimeWindow | None, speed: float) -> Workload:
    """Return a window of a workload (None: all of it) at a speed of its own."""
    workload = workload if window is None else window_of(workload, window)
    return workload if speed == 1.0 else sped_up(workload, speed)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of a sweep. Policy, its settings and the seed are in the configuration."""

    name: str  # unique
    config: SimConfig
    workload: WorkloadLine | Workload


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of a case, or its error."""

    case: Case
    result: SimulationResult | None = None
    error: str | None = None  # one line
    traceback: str | None = None  # of an internal error


class CaseProgress(NamedTuple):
    """Progress of one case."""

    name: str
    simulated_s: float
    num_ended: int  # requests
    is_done: bool


Progress = Callable[[CaseProgress], None]
Over = Callable[[CaseResult], None]


def run_cases(
    cases: Sequence[Case], *, processes: int = 1, progress: Progress = lambda _: None, over: Over = lambda _: None
) -> list[CaseResult]:
    """Simulate all cases, `processes` at a time (1: in this process); return results in their order.

    A failed case, or a process that dies, is a result with an error; other cases continue. `over` gets each result at
    once. Ctrl-C ends all processes before it is raised.
    """
    with CasePool(min(processes, len(cases))) as pool:
        return pool.run(cases, progress, over)


# --- one case


_Outcome = tuple[SimulationResult | None, str | None, str | None]  # the other fields of a CaseResult


def _run_case(case: Case, progress: Progress) -> _Outcome:
    simulated_s, num_ended = 0.0, 0

    def report(seconds: float, ended: int) -> None:
        nonlocal simulated_s, num_ended
        simulated_s, num_ended = seconds, ended
        progress(CaseProgress(case.name, seconds, ended, is_done=False))

    outcome = _outcome_of(case, report)
    if outcome[0] is not None:
        simulated_s, num_ended = outcome[0].duration_s, outcome[0].classes[ALL].num_sent
    progress(CaseProgress(case.name, simulated_s, num_ended, is_done=True))
    return outcome


def _outcome_of(case: Case, report: Callable[[float, int], None]) -> _Outcome:
    try:
        workload = case.workload if isinstance(case.workload, Workload) else case.workload.build()
        workload = as_predicted_for(case.config.cluster.scheduling, workload)
        return Simulation(case.config, workload).run(report), None, None
    except AlignedServeError as error:
        return None, str(error), None
    except Exception as error:  # noqa: BLE001  # outermost loop: one broken policy does not end the sweep
        return None, f"{type(error).__name__}: {error}", traceback.format_exc()


@lru_cache(maxsize=4)
def _built(line: WorkloadLine) -> Workload:
    return build_workload(
        line.line,
        seed=line.seed,
        library=_library(line.data_dir),
        num_requests=line.num_requests,
        duration_s=line.duration_s,
    )


@lru_cache(maxsize=4)
def _library(data_dir: Path | None) -> Library:
    return Library(data_dir)


# --- several processes


@dataclass(slots=True)
class _WorkerProcess:
    process: SpawnProcess
    link: Connection  # pickles over a pipe between this process and its child alone
    number: int | None = None


class CasePool:
    """Processes that simulate case after case, also of several calls of `run`; up to one process, this one does.

    To be used in a `with` statement, which ends the processes.
    """

    def __init__(self, processes: int) -> None:
        self._num_processes = processes
        self._workers: dict[Connection, _WorkerProcess] = {}
        self._cases: Sequence[Case] = ()
        self._progress: Progress = lambda _: None
        self._over: Over = lambda _: None
        self._results: dict[int, CaseResult] = {}
        self._num_begun = 0

    def __enter__(self) -> "CasePool":
        """Return the pool; processes start with their first cases."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for worker in list(self._workers.values()):
            self._stop(worker)

    def run(
        self, cases: Sequence[Case], progress: Progress = lambda _: None, over: Over = lambda _: None
    ) -> list[CaseResult]:
        """Simulate all cases and return their results in order, as `run_cases` does."""
        assert len({case.name for case in cases}) == len(cases), "two cases have the same name"
        self._cases, self._progress, self._over, self._results, self._num_begun = cases, progress, over, {}, 0
        if self._num_processes <= 1:
            for number, case in enumerate(cases):
                self._note(number, CaseResult(case, *_run_case(case, progress)))
            return list(self._results.values())
        for worker in list(self._workers.values()):
            self._assign(worker)
        while len(self._workers) < min(self._num_processes, len(cases)):
            self._start_process()
        while busy := [link for link, worker in self._workers.items() if worker.number is not None]:
            for link in wait(busy):
                assert isinstance(link, Connection)
                self._receive(self._workers[link])
        return [self._results[number] for number in range(len(cases))]

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_cases, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers[ours] = _WorkerProcess(process, ours)
        self._assign(self._workers[ours])

    def _assign(self, worker: _WorkerProcess) -> None:
        worker.number = None
        if self._num_begun == len(self._cases):
            return
        worker.number = self._num_begun
        self._num_begun += 1
        try:
            worker.link.send(self._cases[worker.number])
        except OSError:
            self._handle_death(worker)

    def _receive(self, worker: _WorkerProcess) -> None:
        assert worker.number is not None, "an idle process sends nothing"
        try:
            answer = worker.link.recv()
        except (EOFError, OSError):
            self._handle_death(worker)
            return
        if isinstance(answer, CaseProgress):
            self._progress(answer)
            return
        self._note(worker.number, CaseResult(self._cases[worker.number], *answer))
        self._assign(worker)

    def _note(self, number: int, result: CaseResult) -> None:
        self._results[number] = result
        self._over(result)

    def _handle_death(self, worker: _WorkerProcess) -> None:
        assert worker.number is not None, "an idle process is not asked"
        case = self._cases[worker.number]
        self._stop(worker)
        error = f"its process ended (exit code {worker.process.exitcode})"
        self._note(worker.number, CaseResult(case, error=error))
        self._progress(CaseProgress(case.name, 0.0, 0, is_done=True))
        if self._num_begun < len(self._cases):
            self._start_process()

    def _stop(self, worker: _WorkerProcess) -> None:
        del self._workers[worker.link]
        worker.link.close()
        worker.process.join(timeout=0.2)  # a dying one still gets its exit code; an idle one ends by itself
        worker.process.terminate()
        worker.process.join()


def _serve_cases(link: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the first process decides
    try:
        while True:
            link.send(_run_case(link.recv(), link.send))
    except (EOFError, OSError):
        return

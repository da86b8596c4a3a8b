"""The record of the grid: a line of JSON for every simulation, appended when it has ended, and one for every run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from experiments.common import RESULTS

PATH = RESULTS / "grid.jsonl"


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One simulation; of the real-time requests, unless it says otherwise.

    One that was abandoned has no figure but the number of requests that it could not hold.
    """

    point: str
    system: str
    num_sent: int  # in the whole workload
    num_met: int = 0  # their objectives
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    completed_of_arrived: float | None = None
    fluidity: float | None = None  # of the tokens' deadlines, met
    longest_gap_s: float | None = None
    best_effort_tokens_per_s: float | None = None  # while requests arrived
    at_most: int | None = None  # so many met theirs, when it was abandoned
    ended_s: float = 0.0  # simulated
    cpu_s: float = 0.0  # that it took
    code: str = ""  # digest of what decided

    @property
    def policy(self) -> str:
        return self.system.partition(" ")[0]

    @property
    def kind(self) -> str:
        """Return what a repeated sample speaks for: the policy, with documents beside chat or without."""
        return f"{self.policy}, {'documents beside' if '/be' in self.point else 'chat alone'}"

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_sent

    @property
    def merit(self) -> tuple[bool, float]:
        """Return what a search for the best goes by: more held, or else abandoned later."""
        return self.at_most is None, self.num_met if self.at_most is None else self.ended_s


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """Machine of the outcomes that follow it."""

    machine: dict[str, Any] = {}
    model: str = ""
    hardware: str = ""


class _RunLine(msgspec.Struct, frozen=True):
    run: Run


class Record:
    """All outcomes of a file, the latest of each case. `counts`: only those of which this is true; None: all."""

    def __init__(self, path: Path, counts: Callable[[Outcome], bool] | None = None) -> None:
        self._path = path
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        for line in _read(path):
            if isinstance(line, Outcome) and (counts is None or counts(line)):
                self._note(line)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._outcomes.values())

    def find(self, point: str, system: str) -> Outcome | None:
        return self._outcomes.get((point, system))

    def append(self, outcome: Outcome) -> None:
        """Add a line, whole even beside other processes that add theirs."""
        self._note(outcome)
        _append(self._path, outcome)

    def _note(self, outcome: Outcome) -> None:
        self._outcomes[outcome.point, outcome.system] = outcome


def append_run(path: Path, run: Run) -> None:
    _append(path, _RunLine(run))


def _append(path: Path, line: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)


def _read(path: Path) -> Iterator[Outcome | Run]:
    if not path.exists():
        return
    for text in path.read_bytes().splitlines():
        try:
            if text.startswith(b'{"run"'):
                yield msgspec.json.decode(text, type=_RunLine).run
            else:
                yield msgspec.json.decode(text, type=Outcome)
        except msgspec.DecodeError:
            print(f"{path.name}: a line that was cut short is left out: {text[:40]!r}")

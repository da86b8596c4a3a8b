"""Runs schedules on one site after the other; a site whose schedule failed is not used again."""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import inflict, kill_and_wait
from benchmarks.chaos.judge import RECOVERS_S, Outcome, problems
from benchmarks.chaos.load import BatchLoad, Load, Question, course_of, questions, undisturbed
from benchmarks.chaos.room_process import when_true
from benchmarks.chaos.rooms import Rooms
from benchmarks.chaos.schedules import ChaosFault, ChaosSchedule, Phase
from benchmarks.chaos.seen import ask, held_by

# Phases of a request as its course names them, for each that a schedule may wait for.
_NAMES = {
    Phase.QUEUED: ("tokenise", "to router", "router queue", "to worker"),
    Phase.PREFILL: ("worker queue", "prefill"),
    Phase.HANDOFF: ("handoff", "pool", "to batch"),
    Phase.PREFETCH: ("prefetch",),
}
_LONGEST_WAIT_S = 3.0  # for a phase
_SETTLES_S = 10.0
_SCHEDULES_PER_SITE = 100
_LEAD_S = 0.002  # a fault is begun so much before its moment, which is what a signal takes

Windows = dict[Phase, list[tuple[float, float]]]  # seconds since a burst


@dataclass(frozen=True, slots=True)
class Calm:
    """A site and its load with nothing hurt."""

    answers: dict[Question, str]
    windows: Windows
    num_arenas: int

    @classmethod
    def of(cls, site: Rooms) -> "Calm":
        answers = undisturbed(site, questions())
        return cls(answers, asyncio.run(_undisturbed_windows(site, answers)), len(site.arenas()))


class Stage:
    """A site that is up, and is made anew after a schedule that failed."""

    def __init__(self, make: Callable[[Path], Rooms]) -> None:
        self._make = make
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._site: Rooms | None = None
        self._calm: Calm | None = None
        self._num_run = 0

    def run(self, schedule: ChaosSchedule) -> dict[str, Any]:
        if self._site is None or self._num_run >= _SCHEDULES_PER_SITE:
            self._open()
        site, calm = self._site, self._calm
        assert site is not None, "a site that was opened"
        assert calm is not None, "an opened site was looked at"
        self._num_run += 1
        began_s = time.monotonic()
        outcome, hits = asyncio.run(_Run(site, calm, schedule, f"chaos-{self._num_run}-{schedule.seed}").run())
        found = problems(schedule, outcome)
        record = {
            "seed": schedule.seed,
            "is_survived": not found,
            "problems": found,
            "took_s": round(time.monotonic() - began_s, 2),
            "faults": [{**_plain(fault), **hit} for fault, hit in zip(schedule.faults, hits, strict=True)],
            "outcome": outcome.as_json(),
        }
        if found:
            record["logs"] = site.tail()
            self.close()
        return record

    def close(self) -> None:
        site, self._site = self._site, None
        folder, self._folder = self._folder, None
        if site is not None:
            site.stop()
        if folder is not None:
            folder.cleanup()

    def _open(self) -> None:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
        self._site = self._make(Path(self._folder.name))
        self._site.start()
        self._num_run = 0
        self._calm = Calm.of(self._site)


class _Run:
    """One schedule on a site that is up."""

    def __init__(self, site: Rooms, calm: Calm, schedule: ChaosSchedule, label: str) -> None:
        """`label`: what the ids of its requests begin with."""
        self._site = site
        self._calm = calm
        self._schedule = schedule
        self._rng = random.Random(f"run/{schedule.seed}")
        self._load = Load(site, calm.answers, label)

    async def run(self) -> tuple[Outcome, list[dict[str, Any]]]:
        outcome = Outcome()
        batch = asyncio.create_task(asyncio.to_thread(BatchLoad(self._site, self._calm.answers).run, outcome))
        if self._schedule.faults[0].phase is not Phase.IDLE:
            self._load.burst()
        begun = [await self._fault(fault) for fault in self._schedule.faults]
        if not self._load.streams:
            self._load.burst()
        outcome.recovered_s = await asyncio.to_thread(self._recovers)
        await self._load.judge(outcome)
        await batch
        await asyncio.to_thread(self._look_behind, outcome)
        hits = [
            {"was_there": was_there, "phases_hit": await asyncio.to_thread(self._load.phases_at, at_s)}
            for at_s, was_there in begun
        ]
        return outcome, hits

    async def _fault(self, fault: ChaosFault) -> tuple[float, bool]:
        await asyncio.sleep(fault.pause_s)
        drains = fault.phase is Phase.DRAINING
        await self._until(fault)
        at_s = time.monotonic()
        happening = asyncio.create_task(asyncio.to_thread(inflict, self._site, fault))
        if fault.phase in (Phase.IDLE, Phase.STARTING):
            await asyncio.sleep(0.02)
            self._load.burst(2)
        was_there = await happening
        if drains:
            self._site.drain(fault.target, begins=False)
        return at_s, was_there

    async def _until(self, fault: ChaosFault) -> None:
        if fault.phase is Phase.IDLE:
            await self._load.settle(_LONGEST_WAIT_S)
        elif fault.phase is Phase.STARTING:
            self._load.burst(2)
            await asyncio.to_thread(kill_and_wait, self._site, fault.target)
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
        elif fault.phase is Phase.DRAINING:
            self._site.drain(fault.target, begins=True)
            self._load.burst(2)
            await asyncio.sleep(0.05)
        else:
            await self._until_course(fault.phase)

    async def _until_course(self, phase: Phase) -> None:
        burst, began_s = self._load.burst(), time.monotonic()
        deadline_s = began_s + _LONGEST_WAIT_S
        if phase in _NAMES:
            await asyncio.sleep(max(self._moment(phase) - _LEAD_S, 0.0))
        elif phase is Phase.FIRST_TOKEN:
            await asyncio.sleep(0.004)
        else:
            events = 3 if phase is Phase.DECODE else None
            while not any(one.num_events >= (events or one.question.max_tokens - 3) for one in burst):
                if time.monotonic() > deadline_s:
                    return
                await asyncio.sleep(0.002)

    def _moment(self, phase: Phase) -> float:
        windows = self._calm.windows.get(phase) or [(0.0, 0.03)]
        start_s, end_s = self._rng.choice(windows)
        return self._rng.uniform(start_s, end_s)

    def _recovers(self) -> float | None:
        question = next(iter(self._calm.answers))
        began_s = time.monotonic()
        while time.monotonic() - began_s < RECOVERS_S:
            status, text = ask(self._site.url, "/v1/completions", question.body(self._site.model), timeout_s=RECOVERS_S)
            if status == 200:
                return round(time.monotonic() - began_s, 2) if self._calm.answers[question] in text else None
            time.sleep(0.02)
        return None

    def _look_behind(self, outcome: Outcome) -> None:
        site = self._site

        def num_left() -> int:
            return max(len(site.arenas()) - self._calm.num_arenas, 0)

        def is_clean() -> bool:
            outcome.held, outcome.arenas_left = held_by(site.url), num_left()
            return not outcome.held and not outcome.arenas_left

        # Once is enough: counts may be a second old, but what stays is there for the next schedule to see.
        when_true(is_clean, _SETTLES_S, 0.05)


async def _undisturbed_windows(site: Rooms, answers: dict[Question, str]) -> Windows:
    load = Load(site, answers, "undisturbed")
    burst = load.burst()
    await load.settle()
    await asyncio.sleep(0.6)  # notes come with the ticks of the workers
    windows: Windows = {}
    for stream in burst:
        for name, start_s, end_s in course_of(site, stream):
            for phase in (phase for phase, names in _NAMES.items() if name in names):
                windows.setdefault(phase, []).append((start_s - burst[0].sent_s, end_s - burst[0].sent_s))
    await load.judge(Outcome())
    return windows


def _plain(fault: ChaosFault) -> dict[str, Any]:
    values = asdict(fault)
    return values | {name: values[name].value for name in ("target", "hit", "phase")}


def run_all(
    make: Callable[[Path], Rooms], schedules: Iterable[ChaosSchedule], recorded: Callable[[dict[str, Any]], None]
) -> None:
    """Run schedules one after the other; `recorded` is called with each record."""
    stage = Stage(make)
    try:
        for schedule in schedules:
            recorded(stage.run(schedule))
    finally:
        stage.close()

"""Runs schedules on one set of rooms after the other; a set whose schedule failed is not used again."""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import inflict, kill_and_wait
from benchmarks.chaos.judge import RECOVERS_S, Outcome, problems
from benchmarks.chaos.load import BatchLoad, Load, Question, course_of, questions, undisturbed
from benchmarks.chaos.room_process import when_true
from benchmarks.chaos.rooms import Rooms
from benchmarks.chaos.schedules import ChaosFault, ChaosSchedule, Phase

# Phases of a request as its course names them, for each that a schedule may wait for.
_NAMES = {
    Phase.QUEUED: ("tokenise", "to router", "router queue", "to worker"),
    Phase.PREFILL: ("worker queue", "prefill"),
    Phase.HANDOFF: ("handoff", "pool", "to batch"),
    Phase.PREFETCH: ("prefetch",),
}
_LONGEST_WAIT_S = 3.0  # for a phase
_SETTLES_S = 10.0
_SCHEDULES_PER_ROOMS = 100
_LEAD_S = 0.002  # a fault is begun so much before its moment, which is what a signal takes

Windows = dict[Phase, list[tuple[float, float]]]  # seconds since a burst


class Stage:
    """Rooms that are up, with the answers and the course of an undisturbed load."""

    def __init__(self, *, has_small_disks: bool) -> None:
        self._has_small_disks = has_small_disks
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._rooms: Rooms | None = None
        self._answers: dict[Question, str] = {}
        self._windows: Windows = {}
        self._num_run = 0

    def run(self, schedule: ChaosSchedule) -> dict[str, Any]:
        """Run one schedule and return its record; its rooms are used again unless it failed."""
        if self._rooms is None or self._num_run >= _SCHEDULES_PER_ROOMS:
            self._open()
        rooms = self._rooms
        assert rooms is not None, "rooms that were opened"
        self._num_run += 1
        began_s = time.monotonic()
        outcome, hits = asyncio.run(_Run(rooms, schedule, self._answers, self._windows, self._num_run).run())
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
            record["logs"] = rooms.tail()
            self.close()
        return record

    def close(self) -> None:
        """End the rooms. May be repeated."""
        rooms, self._rooms = self._rooms, None
        folder, self._folder = self._folder, None
        if rooms is not None:
            rooms.stop()
        if folder is not None:
            folder.cleanup()

    def _open(self) -> None:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
        self._rooms = Rooms(Path(self._folder.name), has_small_disks=self._has_small_disks)
        self._rooms.start()
        self._num_run = 0
        self._answers = undisturbed(self._rooms, questions())
        self._windows = asyncio.run(_undisturbed_windows(self._rooms, self._answers))


class _Run:
    """One schedule on rooms that are up."""

    def __init__(
        self, rooms: Rooms, schedule: ChaosSchedule, answers: dict[Question, str], windows: Windows, number: int
    ) -> None:
        self._rooms = rooms
        self._schedule = schedule
        self._answers = answers
        self._windows = windows
        self._rng = random.Random(f"run/{schedule.seed}")
        self._load = Load(rooms, answers, f"chaos-{number}-{schedule.seed}")

    async def run(self) -> tuple[Outcome, list[dict[str, Any]]]:
        """Return what came of it, and of every fault whether it happened and in which phases requests were then."""
        outcome = Outcome()
        batch = asyncio.create_task(asyncio.to_thread(BatchLoad(self._rooms, self._answers).run, outcome))
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
        happening = asyncio.create_task(asyncio.to_thread(inflict, self._rooms, fault))
        if fault.phase in (Phase.IDLE, Phase.STARTING):
            await asyncio.sleep(0.02)
            self._load.burst(2)
        was_there = await happening
        if drains:
            self._rooms.drain(fault.target, begins=False)
        return at_s, was_there

    async def _until(self, fault: ChaosFault) -> None:
        """Wait for the phase of a fault, in a load made for it."""
        if fault.phase is Phase.IDLE:
            await self._load.settle(_LONGEST_WAIT_S)
        elif fault.phase is Phase.STARTING:
            self._load.burst(2)
            await asyncio.to_thread(kill_and_wait, self._rooms, fault.target)
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
        elif fault.phase is Phase.DRAINING:
            self._rooms.drain(fault.target, begins=True)
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
        """Return a moment after a burst at which some request is in this phase, if nothing delays it."""
        windows = self._windows.get(phase) or [(0.0, 0.03)]
        start_s, end_s = self._rng.choice(windows)
        return self._rng.uniform(start_s, end_s)

    def _recovers(self) -> float | None:
        """Return how long after the last fault a new request has its exact answer; None: too long, or a wrong one."""
        question = next(iter(self._answers))
        began_s = time.monotonic()
        while time.monotonic() - began_s < RECOVERS_S:
            status, text = self._rooms.ask("/v1/completions", question.body(), timeout_s=RECOVERS_S)
            if status == 200:
                return round(time.monotonic() - began_s, 2) if self._answers[question] in text else None
            time.sleep(0.02)
        return None

    def _look_behind(self, outcome: Outcome) -> None:
        rooms = self._rooms
        when_true(lambda: not rooms.held() and not rooms.num_arenas_left(), _SETTLES_S, 0.05)
        outcome.held, outcome.arenas_left = rooms.held(), rooms.num_arenas_left()


async def _undisturbed_windows(rooms: Rooms, answers: dict[Question, str]) -> Windows:
    """Return when after a burst its requests are in which phase, with nothing hurt."""
    load = Load(rooms, answers, "undisturbed")
    burst = load.burst()
    await load.settle()
    await asyncio.sleep(0.6)  # notes come with the ticks of the workers
    windows: Windows = {}
    for stream in burst:
        for name, start_s, end_s in course_of(rooms, stream):
            for phase in (phase for phase, names in _NAMES.items() if name in names):
                windows.setdefault(phase, []).append((start_s - burst[0].sent_s, end_s - burst[0].sent_s))
    await load.judge(Outcome())
    return windows


def _plain(fault: ChaosFault) -> dict[str, Any]:
    values = asdict(fault)
    return values | {name: values[name].value for name in ("target", "hit", "phase")}


def run_all(
    schedules: Iterable[ChaosSchedule], *, has_small_disks: bool, recorded: Callable[[dict[str, Any]], None]
) -> None:
    """Run schedules one after the other; `recorded` is called with each record."""
    stage = Stage(has_small_disks=has_small_disks)
    try:
        for schedule in schedules:
            recorded(stage.run(schedule))
    finally:
        stage.close()

"""A picture of some seconds of a live run above the same seconds simulated: iterations, and waits for first tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignedserve.replay.observed import ObservedRun
from alignedserve.replay.simulated import ReplayedRequest, SimulatedMachine, simulation_of
from alignedserve.sim.report.svg import element, number, text
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import Workload

_WIDTH, _LEFT, _LANE, _WAIT, _MOST_ROWS = 900, 80, 22, 6, 14
_KINDS = ("prompt tokens only", "prompt tokens and decodes", "decodes only")
_STYLE = """
text { font: 11px sans-serif; fill: #333 } .k0 { fill: #c0504d } .k1 { fill: #e0a030 } .k2 { fill: #4f81bd }
.wait { stroke: #555; stroke-width: 2 } .track { fill: #f2f2f2 } .middle { text-anchor: middle }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One iteration; `kind` is a place in _KINDS."""

    begin_s: float
    end_s: float
    kind: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run; times count from its first arrival."""

    name: str
    lanes: tuple[tuple[Bar, ...], ...]  # a worker each
    waits: tuple[tuple[float, float], ...]  # from arrivals to first tokens


def observed_timeline(run: ObservedRun, requests: Sequence[ReplayedRequest]) -> Timeline:
    """Return what was recorded."""
    begin_s = min(one.observed.request.arrival_s for one in requests)
    lanes = (
        tuple(
            Bar(one.started_s - begin_s, one.ended_s - begin_s, _kind(one.work.num_prompt_tokens, one.work.num_decodes))
            for one in run.iterations
            if one.worker == worker
        )
        for worker in workers_of(run)
    )
    waits = ((one.observed.request.arrival_s - begin_s, one.observed.token_times_s[0] - begin_s) for one in requests)
    return Timeline("live", tuple(lanes), tuple(waits))


def simulated_timeline(workload: Workload, machine: SimulatedMachine, seed: int, workers: Sequence[str]) -> Timeline:
    """Return a simulation, made once for each worker as one of them keeps its iterations."""
    lanes: list[tuple[Bar, ...]] = []
    waits: tuple[tuple[float, float], ...] = ()
    for worker in workers:
        simulation = Simulation(replace(simulation_of(machine, seed), timeline_of=worker), workload)
        result = simulation.run()
        records = sorted(simulation.records(), key=lambda one: one.number)
        begin_s = min(one.arrival_s for one in records)
        lanes.append(
            tuple(
                Bar(one.started_s - begin_s, one.ended_s - begin_s, _kind(one.num_prompt_tokens, one.num_decodes))
                for one in result.timeline
            )
        )
        waits = tuple(
            (one.arrival_s - begin_s, one.arrival_s - begin_s + one.ttft_s) for one in records if one.ttft_s is not None
        )
    return Timeline("simulated", tuple(lanes), waits)


def workers_of(run: ObservedRun) -> list[str]:
    """Return the names of the workers that computed anything."""
    return sorted({one.worker for one in run.iterations})


def draw(title: str, timelines: Sequence[Timeline], begin_s: float, seconds: float) -> str:
    """Draw these seconds of each run, one below the other."""
    y, parts = 44, [element("style", _STYLE), text(title, x=8, y=14)]
    for number_of, kind in enumerate(_KINDS):
        parts.append(element("rect", x=8 + 190 * number_of, y=22, width=10, height=10, class_=f"k{number_of}"))
        parts.append(text(kind, x=22 + 190 * number_of, y=31))
    parts.append(text("lines: from a request's arrival to its first token", x=590, y=31))
    for one in timelines:
        drawn, height = _panel(one, begin_s, seconds, y)
        parts.append(drawn)
        y += height + 12
    ticks = range(int(seconds) + 1)
    parts += [text(f"{begin_s + tick:g} s", x=_x(tick, seconds), y=y + 6, class_="middle") for tick in ticks]
    box = f"0 0 {_WIDTH} {y + 14}"
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=title)


def _panel(timeline: Timeline, begin_s: float, seconds: float, top: int) -> tuple[str, int]:
    """Return one run's part of the picture, and its height."""
    parts, y = [text(timeline.name, x=8, y=top + 15)], top
    for lane in timeline.lanes:
        parts.append(element("rect", x=_LEFT, y=y, width=_WIDTH - _LEFT - 8, height=_LANE, class_="track"))
        parts += [
            element("path", d=_boxes(lane, kind, begin_s, seconds, y), class_=f"k{kind}") for kind in range(len(_KINDS))
        ]
        y += _LANE + 3
    rows: list[float] = []  # where each row of waits ends
    for arrival_s, first_s in sorted(timeline.waits):
        if first_s < begin_s or arrival_s > begin_s + seconds:
            continue
        row = next((place for place, end_s in enumerate(rows) if end_s <= arrival_s), len(rows))
        if row >= _MOST_ROWS:
            continue
        rows[row : row + 1] = [first_s]
        left, right = (_x(min(max(one - begin_s, 0.0), seconds), seconds) for one in (arrival_s, first_s))
        level = y + 4 + _WAIT * row
        parts.append(element("line", x1=left, x2=max(right, left + 0.5), y1=level, y2=level, class_="wait"))
    return "".join(parts), y - top + _WAIT * len(rows) + 6


def _x(second: float, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 8) * second / seconds


def _boxes(lane: Sequence[Bar], kind: int, begin_s: float, seconds: float, y: int) -> str:
    boxes = []
    for bar in lane:
        if bar.kind != kind or bar.end_s <= begin_s or bar.begin_s >= begin_s + seconds:
            continue
        left, right = (_x(min(max(one - begin_s, 0.0), seconds), seconds) for one in (bar.begin_s, bar.end_s))
        width = max(right - left - 0.3, 0.2)
        boxes.append(f"M{number(left)} {y}h{width:.2f}v{_LANE}h-{width:.2f}z")
    return "".join(boxes)


def _kind(num_prompt_tokens: int, num_decodes: int) -> int:
    if not num_prompt_tokens:
        return 2
    return 1 if num_decodes else 0

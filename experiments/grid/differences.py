"""Why points are lost: the requests that only the default holds and those that only another system does.

    python -m experiments.grid.differences [POINT ...]

Both systems have the same requests of the first seed, each simulated to its end; without names of points, where another
is more than a point ahead. For each request that only one of them holds: its objectives, when its first token came, its
mean gap, the workers that it was given to, and whether it moved between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.progress import track
from typing_extensions import override

from alignedserve.messages.events import Send
from alignedserve.messages.workers import MoveRequest, PrefillRequest
from benchmarks.measuring.arguments import parser_of
from experiments.common import Row, chosen, print_table
from experiments.grid.points import Point, all_points
from experiments.grid.record import PATH, Record
from experiments.grid.search import is_searched
from experiments.grid.summary import CLAIMED_POINTS, row_of
from experiments.grid.systems import DEFAULT, System, others
from lab.sim.components import AnyLogic
from lab.sim.config import SimConfig
from lab.sim.records import RequestRecord
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload

_COLUMNS = {
    name: name.replace("_", " ")
    for name in ("arrival_s", "prompt_len", "output_len", "ttft_slo", "tpot_slo", "holds", "ttft", "tpot", "workers")
}


class Served(NamedTuple):
    """One request as a system served it."""

    timed: TimedRequest
    record: RequestRecord
    workers: Sequence[str]  # that its prompt was given to, and then those it moved to


class _Observed:
    """A router's logic, with every PrefillRequest and MoveRequest that it sends noted."""

    def __init__(self, logic: AnyLogic, workers_of: dict[str, list[str]]) -> None:
        self._logic = logic
        self._workers_of = workers_of

    def on_event(self, event: Any, now: float) -> Sequence[Any]:
        """Decide as the logic does."""
        commands: Sequence[Any] = self._logic.on_event(event, now)
        for command in commands:
            if not isinstance(command, Send):
                continue
            if isinstance(command.message, PrefillRequest):
                self._workers_of.setdefault(command.message.request.request_id, []).append(command.peer)
            elif isinstance(command.message, MoveRequest):
                self._workers_of[command.message.request_id].append(command.message.to)
        return commands


class _ObservedSimulation(Simulation):
    """A simulation that notes which workers had each request."""

    def __init__(self, config: SimConfig, workload: Workload) -> None:
        self.workers_of: dict[str, list[str]] = {}
        super().__init__(config, workload)

    @override
    def _router_logic(self) -> AnyLogic:
        return _Observed(super()._router_logic(), self.workers_of)


def serve(point: Point, system: System) -> list[Served]:
    """Return the real-time requests of a point in the order of their coming."""
    workload = point.workload().build()
    config = replace(system.config(point.accelerators), miss_limits={"rt": len(workload.requests)})
    simulation = _ObservedSimulation(replace(config, ends_when_settled=True), workload)
    simulation.run()
    records = sorted((one for one in simulation.records() if one.class_name == "rt"), key=lambda one: one.number)
    return [
        Served(timed, record, simulation.workers_of.get(f"r{record.number:07d}", ()))
        for timed, record in zip(workload.requests, records, strict=True)
    ]


def compare(point: Point, other: System) -> Row:
    """Return how many requests each of the two holds, and which requests only one holds."""
    ours, theirs = serve(point, DEFAULT), serve(point, other)
    requests = list(_requests(ours, theirs))
    return {
        "point": point.name,
        "of": other.name(point.accelerators),
        "num_sent": len(ours),
        "num_met": sum(one.record.has_met_slo for one in ours),
        "num_met_by_other": sum(one.record.has_met_slo for one in theirs),
        "num_moved": sum(len(one.workers) > 1 for one in ours),
        "num_elsewhere": sum(a.workers[:1] != b.workers[:1] for a, b in zip(ours, theirs, strict=True)),
        "requests": chosen(requests, requests[0]) if requests else [],
    }


def _requests(ours: Sequence[Served], theirs: Sequence[Served]) -> Iterator[Row]:
    first_s = ours[0].record.arrival_s - ours[0].timed.arrival_s
    for one, other in zip(ours, theirs, strict=True):
        if one.record.has_met_slo == other.record.has_met_slo:
            continue
        slo = one.timed.slo
        yield {
            "arrival_s": one.record.arrival_s - first_s,
            "prompt_len": one.timed.prompt_len,
            "output_len": one.timed.output_len,
            "ttft_slo": slo.ttft_s,
            "tpot_slo": slo.tpot_s,
            "holds": "default" if one.record.has_met_slo else "other",
            "ttft": _pair(one.record.ttft_s, other.record.ttft_s),
            "tpot": _pair(one.record.tpot_s, other.record.tpot_s),
            "workers": [" ".join(one.workers), " ".join(other.workers)],
        }


def _pair(ours: float | None, theirs: float | None) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in (ours, theirs)]


def _lost(record: Record) -> list[Point]:
    """Return the points at which another is more than a point ahead."""
    searched = [point for point in all_points() if is_searched(point, record)]
    return [point for point in searched if row_of(point, record).get("ahead", 0.0) < -CLAIMED_POINTS]


def main() -> None:
    """Compare, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("points", nargs="*", help="by their names; the other is the best of the field there")
    wanted = parser.parse_args().points
    record = Record(PATH)
    known = {point.name: point for point in all_points()}
    points = [known[name] for name in wanted] or _lost(record)
    cases = [(point, others(point.accelerators)[row_of(point, record)["of"]]) for point in points]
    compared = [compare(point, other) for point, other in track(cases, "points", transient=True)]
    for row in compared:
        title = ", ".join(f"{name} {value}" for name, value in row.items() if name != "requests")
        print_table(row["requests"], _COLUMNS, title=title)


if __name__ == "__main__":
    main()

"""Elastic workers, colocated ones and every split into prefill and decode workers, where chunks cost what was measured.

    python -m experiments.separation [--quick] [--processes 2] [--parts calibrated contended roofline ...]

Twenty points of four traces and five kinds of objectives and load, on four accelerators, ten minutes of arrivals and up
to five seeds each. A part is a cost model (docs/costmodels.md): `calibrated` has chunks that cost more than their
tokens, `contended` also the most that prompts and decodes have been seen to take from each other, `roofline` neither.

A split is abandoned as soon as it is sure to hold over ten points less than elastic workers did with that seed. All are
simulated with the first seed. A point where none comes nearer is decided; at the others elastic workers, colocated ones
and the best split are simulated with further seeds. What is done is recorded at once, and not done again.
docs/experiments/separation.md says what was found.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.sections import Topology
from alignedserve.costmodel.roofline import CALIBRATIONS
from benchmarks.measuring.intervals import interval
from experiments.common import (
    RESULTS,
    LabelledCase,
    Row,
    chosen,
    line,
    pick,
    print_table,
    read_options,
    run,
    write_record,
)
from experiments.grid.points import MAX_TOTAL, OUTSTANDING, TRACES
from experiments.grid.systems import HARDWARE, MODEL, UNION, System
from experiments.steady import LEAST_S, LEAST_SEEDS
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimConfig
from lab.sim.policies import ClusterHardware
from lab.sim.result import SimulationResult
from lab.sim.sweep import Case, WorkloadLine

NAME = "separation"
PARTS = (*CALIBRATIONS, "roofline")
ACCELERATORS = 4
SEEDS = tuple(range(1, LEAST_SEEDS + 1))
BEHIND = 0.1  # of the requests: so far behind elastic workers a split is abandoned
_ENOUGH = 0.99

ELASTIC, COLOCATED = System(UNION, Topology.ELASTIC), System(UNION, Topology.COLOCATED)
SPLITS = [System(UNION, Topology.DISAGGREGATED, num_prefill) for num_prefill in range(1, ACCELERATORS)]
COLUMNS: Mapping[str, str] = {
    "part": "costs",
    "point": "point",
    "rate": "requests/s",
    "elastic": "elastic %",
    "colocated": "colocated %",
    "split": "best split",
    "split_held": "it holds %",
    "ahead": "elastic ahead of it",
    "ahead_half": "95 %",
    "of_colocated": "and of colocated",
    "of_colocated_half": "95 %",
}
HOSTS, HOSTS_MOVES = f"{UNION} elastic, hosts apart", f"{UNION} elastic, hosts apart, moves"
_LABELS = ("part", "point", "system", "policy", "seed", "code")
_RECORDED = (
    *_LABELS, "rate", "rt.num_sent", "rt.attainment", "rt.ttft_attainment", "rt.tpot_attainment", "rt.fluidity",
    "rt.longest_gap_s", "rt.completed_of_arrived", "be.loaded_tokens_per_s", "num_handoffs", "duration_s", "sent_s",
    "workload", "is_abandoned",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """Requests of a trace with objectives of one kind, at a share of what one accelerator carries."""

    trace: str
    kind: str
    load: float
    seconds: float = LEAST_S

    @property
    def name(self) -> str:
        """Return its name: `azure_conv, gaps`."""
        return f"{self.trace}, {self.kind}"

    @property
    def rate(self) -> float:
        """Return the requests per second."""
        return round(self.load * TRACES[self.trace].capacity * ACCELERATORS, 3)

    def workload(self, seed: int) -> WorkloadLine:
        """Return the requests; with documents outstanding beside them where the kind has some."""
        trace = TRACES[self.trace]
        kind = KINDS[self.kind]
        text = (
            f"rt: {self.trace}, max_total={MAX_TOTAL}, arrivals=gamma, rate={self.rate:g}, "
            f"ttft={kind.wide * trace.ttft_s:g}, tpot={kind.tpot_s:g}"
        )
        if kind.has_documents:
            text += f"; be: {trace.beside}, max_total={MAX_TOTAL}, outstanding={OUTSTANDING * ACCELERATORS}"
        return line(text, seed, duration_s=self.seconds)


class Kind(NamedTuple):
    """Objectives, and what is served beside them."""

    wide: float  # times as long as the trace's tight TTFT
    tpot_s: float
    share: float = 1.0  # of the trace's load
    has_documents: bool = False


KINDS: Mapping[str, Kind] = {
    "gaps": Kind(4.0, 0.04),
    "short gaps": Kind(4.0, 0.025, share=0.5),  # hardly above what decodes alone take: chunks find no time beside them
    "both, beside documents": Kind(1.0, 0.05, has_documents=True),
    "first tokens": Kind(1.0, 0.2),
    "first tokens, more load": Kind(1.0, 0.2, share=1.25),
}
LOADS: Mapping[str, float] = {"azure_conv": 0.8, "azure_code": 0.9, "arxiv": 0.7, "sharegpt": 0.8}
POINTS = [Point(trace, kind, load * KINDS[kind].share) for (trace, load), kind in product(LOADS.items(), KINDS)]


def case_of(part: str, point: Point, system: System, seed: int) -> LabelledCase:
    """Return the simulation of a system at a point, until all is known of each request."""
    machines = ClusterHardware(WorkerSpec(MODEL, HARDWARE), source=part)
    config = replace(system.config(ACCELERATORS, machines), ends_when_settled=True, miss_limits={"rt": 1 << 40})
    if system.topology is Topology.DISAGGREGATED:  # over NVLink, not through a pool in the host's memory
        config = _with_router(config, direct_handoff=True)
    labels: Mapping[str, str | float] = {
        "part": part,
        "point": point.name,
        "system": system.name(ACCELERATORS),
        "policy": system.policy,
        "rate": point.rate,
        "seed": seed,
    }
    name = " ".join(map(str, labels.values()))
    return LabelledCase(labels, Case(name, config, point.workload(seed)))


def _with_router(config: SimConfig, **settings: bool) -> SimConfig:
    changed = msgspec.structs.replace
    return replace(config, cluster=changed(config.cluster, router=changed(config.cluster.router, **settings)))


def on_hosts(case: LabelledCase, *, has_moves: bool) -> LabelledCase:
    """Return elastic workers each on a host of its own, with moves between them or without."""
    name = HOSTS_MOVES if has_moves else HOSTS
    config = replace(_with_router(case.case.config, moves_between_nodes=has_moves), num_pools=ACCELERATORS)
    return LabelledCase(
        {**case.labels, "system": name}, replace(case.case, name=f"{case.case.name} {name}", config=config)
    )


def bounded(case: LabelledCase, held: float, num_sent: float) -> LabelledCase:
    """Return a case that is abandoned once it is sure to hold `BEHIND` less than that."""
    most = round(num_sent * (1.0 - max(held - BEHIND, 0.0)))
    return case._replace(case=replace(case.case, config=replace(case.case.config, miss_limits={"rt": most})))


def cases_of(*, is_quick: bool) -> list[LabelledCase]:
    """Return all cases without bounds: for samples that are simulated again."""
    points, seeds = ([replace(POINTS[0], seconds=30.0)], SEEDS[:1]) if is_quick else (POINTS, SEEDS)
    found = [case_of(*of) for of in product(PARTS, points, (ELASTIC, COLOCATED, *SPLITS), seeds)]
    elastic = [case_of(*of) for of in product(PARTS, points, (ELASTIC,), seeds)]
    return found + [on_hosts(case, has_moves=has_moves) for case, has_moves in product(elastic, (False, True))]


# --- runs


class Runs:
    """Rows that are recorded, and those that are simulated now."""

    def __init__(self, rows: Iterable[Row], *, processes: int, is_recorded: bool) -> None:
        self.rows = list(rows)
        self._processes = processes
        self._is_recorded = is_recorded

    def find(self, case: LabelledCase) -> Row | None:
        """Return the row of a case."""
        labels = {name: case.labels[name] for name in ("part", "point", "system", "seed")}
        return next(iter(pick(self.rows, **labels)), None)

    def add(self, cases: Sequence[LabelledCase]) -> None:
        """Simulate the cases that have no row, and record them."""
        missing = [case for case in cases if self.find(case) is None]
        if not missing:
            return
        self.rows += chosen(run(missing, processes=self._processes, also=_further), _RECORDED)
        if self._is_recorded:
            write_record(NAME, figures_of(self.rows))

    def search(self, part: str, points: Sequence[Point], seeds: Sequence[int]) -> None:
        """Simulate what is missing of a part: further seeds only where a split is not abandoned with the first."""
        first, *further = seeds
        self.add([case_of(part, point, ELASTIC, first) for point in points])
        self.add([self._bounded(part, point, split, first) for point, split in product(points, SPLITS)])
        open_ones = [point for point in points if is_open(self.rows, part, point.name)]
        for seed in further:
            self.add([case_of(part, point, ELASTIC, seed) for point in open_ones])
            self.add([self._bounded(part, one, best_split(self.rows, part, one.name), seed) for one in open_ones])
            self.add([case_of(part, point, COLOCATED, seed) for point in open_ones])
        self.add([case_of(part, point, COLOCATED, first) for point in points])

    def _bounded(self, part: str, point: Point, system: System, seed: int) -> LabelledCase:
        elastic = self.find(case_of(part, point, ELASTIC, seed))
        assert elastic is not None
        case = case_of(part, point, system, seed)
        return bounded(case, elastic["rt.attainment"], elastic["rt.num_sent"])

    def search_hosts(self, part: str, points: Sequence[Point], seeds: Sequence[int]) -> None:
        """Simulate elastic workers on hosts apart, with and without moves between them."""
        for seed in seeds:
            cases = [case_of(part, point, ELASTIC, seed) for point in points]
            self.add([on_hosts(case, has_moves=has_moves) for case, has_moves in product(cases, (False, True))])


def _further(result: SimulationResult) -> Row:
    return {"num_handoffs": result.num_handoffs_verified, "is_abandoned": result.is_abandoned}


def is_open(rows: Sequence[Row], part: str, point: str) -> bool:
    """Return whether a split ran to its end with the first seed."""
    names = [split.name(ACCELERATORS) for split in SPLITS]
    at = pick(rows, part=part, point=point, seed=SEEDS[0], is_abandoned=False)
    return any(row["system"] in names for row in at)


def best_split(rows: Sequence[Row], part: str, point: str) -> System:
    """Return the split that holds most with the first seed, or else is abandoned last."""

    def merit(split: System) -> tuple[bool, float]:
        row = pick(rows, part=part, point=point, system=split.name(ACCELERATORS), seed=SEEDS[0])[0]
        return not row["is_abandoned"], row["duration_s"] if row["is_abandoned"] else row["rt.attainment"]

    return max(SPLITS, key=merit)


# --- what comes of it


def figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what is recorded: runs to their end, those that were abandoned, and the comparison of points."""
    runs = [row for row in rows if not row["is_abandoned"]]
    return {
        "compared": compared(rows),
        "hosts": hosts(rows),
        "runs": [{name: value for name, value in row.items() if name != "is_abandoned"} for row in runs],
        "abandoned": [{name: row[name] for name in (*_LABELS, "duration_s")} for row in rows if row["is_abandoned"]],
    }


def recorded_rows() -> list[Row]:
    """Return the rows of the record."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return []
    figures = json.loads(path.read_text())["figures"]
    runs = [{**row, "is_abandoned": False} for row in figures["runs"]]
    return [*runs, *({**row, "is_abandoned": True} for row in figures["abandoned"])]


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each point of each part, of the seeds that all are done with."""
    found = []
    for part, point in product(PARTS, POINTS):
        at = pick(rows, part=part, point=point.name)
        if not all(pick(at, system=one.name(ACCELERATORS), seed=SEEDS[0]) for one in (ELASTIC, COLOCATED, *SPLITS)):
            continue
        split = best_split(at, part, point.name)
        theirs = pick(at, system=split.name(ACCELERATORS))
        ours, near = (_held(at, system.name(ACCELERATORS)) for system in (ELASTIC, COLOCATED))
        seeds = set(ours) & set(near) & {row["seed"] for row in theirs}
        ours, near, held = (
            {seed: one[seed] for seed in seeds if seed in one}
            for one in (ours, near, _held(theirs, split.name(ACCELERATORS)))
        )
        num_seeds = len(seeds)
        apart, of_colocated = _apart(ours, held), _apart(ours, near)
        found.append(
            {
                "part": part,
                "point": point.name,
                "rate": point.rate,
                "num_seeds": num_seeds,
                "elastic": mean(ours.values()),
                "colocated": mean(near.values()),
                "split": split.name(ACCELERATORS).removeprefix(f"{UNION} "),
                "split_held": mean(held.values()) if len(held) == num_seeds else None,
                "num_abandoned": num_seeds - len(held),
                "contested": mean(ours.values()) < 100 * _ENOUGH,
                "ahead": apart[0],
                "ahead_half": apart[1],
                "of_colocated": of_colocated[0],
                "of_colocated_half": of_colocated[1],
                "handoffs": mean(row["num_handoffs"] for row in pick(at, system=ELASTIC.name(ACCELERATORS))),
            }
        )
    return chosen(found, found[0]) if found else []


def hosts(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each point of each part at which elastic workers were simulated on hosts apart."""
    found = []
    for part, point in product(PARTS, POINTS):
        at = pick(rows, part=part, point=point.name)
        alone, moving, together = (_held(at, name) for name in (HOSTS, HOSTS_MOVES, ELASTIC.name(ACCELERATORS)))
        seeds = set(alone) & set(moving) & set(together)
        if seeds:
            alone, moving, together = ({seed: one[seed] for seed in seeds} for one in (alone, moving, together))
            (gain, gain_half), (lost, lost_half) = _apart(moving, alone), _apart(together, alone)
            found.append(
                {
                    "part": part,
                    "point": point.name,
                    "num_seeds": len(seeds),
                    "alone": mean(alone.values()),
                    "moving": mean(moving.values()),
                    "gain": gain,
                    "gain_half": gain_half,
                    "of_one_host": lost,
                    "of_one_host_half": lost_half,
                    "handoffs": mean(row["num_handoffs"] for row in pick(at, system=HOSTS_MOVES)),
                }
            )
    return chosen(found, found[0]) if found else []


def _held(rows: Sequence[Row], system: str) -> dict[int, float]:
    """Return the percentage that each seed's requests held; without those that were abandoned."""
    ended = pick(rows, system=system, is_abandoned=False)
    return {int(row["seed"]): 100 * float(row["rt.attainment"]) for row in ended}


def _apart(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return the mean lead and its interval; None: not every seed of theirs has ended."""
    if set(ours) != set(theirs):
        return None, None
    found = interval([ours[seed] - theirs[seed] for seed in sorted(ours)])
    return found.mean, found.half


def main() -> None:
    """Simulate what is missing, show and record."""
    options = read_options(__doc__)
    if options.is_quick:
        quick = Runs((), processes=1, is_recorded=False)
        quick.search(PARTS[0], [replace(POINTS[0], seconds=30.0)], SEEDS[:1])
        print_table(quick.rows, {name: name for name in ("system", "rt.attainment", "num_handoffs")})
        return
    runs = Runs(recorded_rows(), processes=options.processes, is_recorded=True)
    for part in options.parts or PARTS:
        runs.search(part, POINTS, SEEDS)
        runs.search_hosts(part, POINTS, SEEDS)
    print_table(compared(runs.rows), COLUMNS, title=NAME)
    print_table(hosts(runs.rows), {name: name for name in ("part", "point", "alone", "moving", "gain", "gain_half")})


if __name__ == "__main__":
    main()

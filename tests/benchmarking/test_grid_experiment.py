"""The grid: its order, what is simulated at a point and what is not, its record and its summary."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from alignedserve.config.sections import Topology
from experiments.grid.picture import draw
from experiments.grid.points import LOADS, TRACES, Point, all_points
from experiments.grid.record import Outcome, Record, append_run
from experiments.grid.search import is_searched, search_point, simulate
from experiments.grid.summary import summary_of
from experiments.grid.systems import DEFAULT, System, families

POINT = Point("arxiv", 1.02, "tight", 4, has_best_effort=True)
ELASTIC = DEFAULT.name(4)


class Bench:
    """Simulations whose results are made up: so many of a hundred held by each system."""

    def __init__(self, held: Mapping[str, int], path: Path) -> None:
        self.held = dict(held)
        self.asked: list[str] = []
        self.record = Record(path)

    def search(self) -> list[str]:
        """Return what was simulated for it."""
        self.asked = []
        search_point(POINT, self.record, self._simulated)
        return self.asked

    def _simulated(self, point: Point, system: System, best: int | None) -> Outcome:
        name = system.name(point.accelerators)
        self.asked.append(name)
        held = self.held.get(name, 10)
        if best is not None and held <= best:
            return Outcome(point.name, name, 100, at_most=best, ended_s=float(held))
        return Outcome(point.name, name, 100, num_met=held, commit="c")


def test_every_block_has_each_combination_once_and_spreads_the_loads() -> None:
    points = all_points()
    assert len(points) == len(set(points)) == 540
    for block in (points[start : start + 90] for start in range(0, 540, 90)):
        assert len({(one.trace, one.objectives, one.accelerators, one.has_best_effort) for one in block}) == 90
        for trace in TRACES:
            loads = Counter(one.load for one in block if one.trace == trace)
            assert set(loads) == set(LOADS)
            assert max(loads.values()) - min(loads.values()) <= 1


def test_every_system_can_be_configured_and_every_workload_built() -> None:
    for point in {one.trace: one for one in all_points()}.values():
        assert point.workload().build().requests
    names = [one.name(4) for systems, _ in families(4) for one in systems]
    assert len(names) == len(set(names)) == 13
    for systems, first in families(2):
        assert systems[first].config(2).cluster.decode.count in (1, 2)
    assert DEFAULT.config(8).cluster.chosen_topology is Topology.ELASTIC


def test_nothing_else_is_simulated_where_the_default_holds_nearly_all(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 99}, tmp_path / "r.jsonl")
    assert bench.search() == [ELASTIC]
    assert is_searched(POINT, bench.record)


def test_budgets_and_splits_are_climbed_as_long_as_the_next_does_better(tmp_path: Path) -> None:
    held = {
        ELASTIC: 70,
        "aligned_slo colocated": 60,
        "sarathi 1024 colocated": 50,
        "sarathi 2048 colocated": 40,
        "fcfs 1 + 3": 80,
    }
    bench = Bench(held, tmp_path / "r.jsonl")
    asked = bench.search()
    assert [one for one in asked if "sarathi" in one] == [
        f"sarathi {budget} colocated" for budget in (512, 1024, 2048, 256)
    ]
    assert [one for one in asked if "fcfs" in one] == ["fcfs colocated", "fcfs 2 + 2", "fcfs 3 + 1", "fcfs 1 + 3"]
    (row,) = summary_of(bench.record)["points"]
    assert (row["default"], row["best"], row["of"], row["ahead"]) == (70.0, 80.0, "fcfs 1 + 3", -10.0)
    assert row["gain"] == pytest.approx(-12.5)
    assert row["left_out"] == ["sarathi 128 colocated"]


def test_what_is_recorded_is_not_simulated_again_unless_it_tells_too_little(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    bench = Bench({ELASTIC: 70, "aligned_slo colocated": 60}, path)
    append_run(path, {"commit": "c"})
    bench.search()
    path.write_bytes(path.read_bytes() + b'{"point":"arx')  # interrupted while it wrote
    again = Bench(bench.held, path)
    assert again.search() == []
    again.record.drop(POINT.name, "aligned_slo", ["c"])
    again.held["aligned_slo colocated"] = 20
    asked = again.search()
    assert ELASTIC in asked
    assert "fcfs colocated" in asked  # it was abandoned at 60, and 20 is the best now
    assert not is_searched(POINT, Record(tmp_path / "none.jsonl"))


def test_the_picture_has_a_cell_for_every_point() -> None:
    drawn = draw([{"point": POINT.name, "ahead": -3.2, "default": 90.0, "best": 93.2, "of": "fcfs colocated"}])
    assert drawn.count("<title>") == 540
    assert "arxiv/1.02/tight/4/be: 90.0 %; fcfs colocated 93.2 %" in drawn


@pytest.mark.slow
def test_an_abandoned_case_could_not_have_held_more() -> None:
    point = Point("azure_conv", 0.78, "loose", 2, has_best_effort=True)
    system = System("fcfs", Topology.COLOCATED)
    whole = simulate(point, system, None)
    assert 0 < whole.num_met < whole.num_sent
    assert whole.best_effort_tokens_per_s
    assert simulate(point, system, whole.num_met - 1).num_met == whole.num_met
    abandoned = simulate(point, system, whole.num_met + 1)
    assert abandoned.at_most == whole.num_met + 1
    assert abandoned.ended_s <= whole.ended_s

"""The grid: its order, what is simulated at a point and what is not, its record and its summary."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.sections import Topology
from experiments.grid.differences import compare
from experiments.grid.picture import draw, draw_field
from experiments.grid.points import LOADS, SEEDS, TRACES, Point, all_points
from experiments.grid.record import Outcome, Record, Run, append_run
from experiments.grid.search import is_repeated, is_searched, repeat_point, search_point, simulate
from experiments.grid.summary import points_apart, summary_of
from experiments.grid.systems import DEFAULT, System, field_families, others, own_families

POINT = Point("arxiv", 1.02, "tight", 4, has_best_effort=True)
ELASTIC = DEFAULT.name(4)
COLOCATED = "aligned_slo colocated"


class Bench:
    """Simulations whose results are made up: so many of a hundred held by each system, or else ten."""

    def __init__(
        self, held: Mapping[str, int], path: Path, of_seeds: Mapping[tuple[int, str], int] | None = None
    ) -> None:
        self.held = dict(held)
        self.of_seeds = of_seeds or {}
        self.asked: list[str] = []
        self.record = Record(path)

    def search(self) -> list[str]:
        """Return what was simulated for it."""
        self.asked = []
        search_point(POINT, self.record, self._simulated)
        return self.asked

    def repeat(self) -> list[str]:
        """Return what was simulated for it with all seeds."""
        self.asked = []
        repeat_point(POINT, self.record, self._simulated)
        return self.asked

    def _simulated(self, point: Point, system: System, best: int | None) -> Outcome:
        name = system.name(point.accelerators)
        self.asked.append(name if point.seed == SEEDS[0] else f"{name}, seed {point.seed}")
        held = self.of_seeds.get((point.seed, name), self.held.get(name, 10))
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
    assert len(others(4)) == 13
    for systems, first in (*own_families(2), *field_families(2)):
        assert systems[first].config(2).cluster.decode.count in (1, 2)
    assert DEFAULT.config(8).cluster.chosen_topology is Topology.ELASTIC


def test_another_seed_is_another_workload_under_another_name() -> None:
    for trace in ("azure_conv", "arxiv"):
        first = Point(trace, 0.3, "tight", 2, has_best_effort=False)
        other = replace(first, seed=2)
        assert other.name == f"{first.name}/seed2"
        assert other.workload().build().requests != first.workload().build().requests


def test_nothing_else_is_simulated_where_the_default_holds_nearly_all(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 99}, tmp_path / "r.jsonl")
    assert bench.search() == [ELASTIC]
    assert is_searched(POINT, bench.record)


def test_budgets_and_splits_are_climbed_as_long_as_the_next_does_better(tmp_path: Path) -> None:
    held = {
        ELASTIC: 70,
        COLOCATED: 60,
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


def test_the_field_is_simulated_to_its_end_where_none_holds_nearly_all(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 70, COLOCATED: 60, "sarathi 512 colocated": 40, "fcfs colocated": 35}, tmp_path / "r.jsonl")
    bench.search()
    (row,) = summary_of(bench.record)["points"]
    assert (row["of"], row["gain"]) == (COLOCATED, pytest.approx(100 / 6, abs=0.001))
    assert (row["field"], row["field_of"], row["field_gain"]) == (40.0, "sarathi 512 colocated", 75.0)
    fcfs = bench.record.find(POINT.name, "fcfs colocated")
    assert fcfs is not None
    assert fcfs.at_most == 40
    totals = summary_of(bench.record)["all"]
    assert (totals["num_field"], totals["summed_field_gain"], totals["num_field_ahead"]) == (1, 75.0, 0)


def test_the_field_is_abandoned_where_colocated_workers_hold_nearly_all(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 70, COLOCATED: 100, "sarathi 512 colocated": 40}, tmp_path / "r.jsonl")
    bench.search()
    sarathi = bench.record.find(POINT.name, "sarathi 512 colocated")
    assert sarathi is not None
    assert sarathi.at_most == 100
    (row,) = summary_of(bench.record)["points"]
    assert (row["ahead"], "field" in row) == (-30.0, False)


def test_all_seeds_together_decide_where_the_first_says_that_another_is_ahead(tmp_path: Path) -> None:
    of_seeds = {(2, "aligned_slo elastic"): 80, (3, "aligned_slo elastic"): 84, (2, "fcfs 1 + 3"): 75}
    bench = Bench({ELASTIC: 70, COLOCATED: 60, "fcfs 1 + 3": 73}, tmp_path / "r.jsonl", of_seeds)
    bench.search()
    assert points_apart(bench.record) == [POINT]
    assert not is_repeated(POINT, bench.record)
    assert "fcfs 1 + 3, seed 3" in bench.repeat()
    assert is_repeated(POINT, bench.record)
    (row,) = summary_of(bench.record)["points"]
    assert (row["num_seeds"], row["num_sent"], row["default"]) == (3, 300, 78.0)
    assert row["of"] == "fcfs 1 + 3"
    assert row["best"] == pytest.approx((73 + 75 + 73) / 3, abs=0.01)
    assert points_apart(bench.record) == [POINT]  # it is by the first seed that points are chosen


def test_what_is_recorded_is_not_simulated_again_unless_it_tells_too_little(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    bench = Bench({ELASTIC: 70, COLOCATED: 60}, path)
    append_run(path, Run("c"))
    bench.search()
    path.write_bytes(path.read_bytes() + b'{"point":"arx')  # interrupted while it wrote
    again = Bench(bench.held, path)
    assert again.search() == []
    assert not is_searched(POINT, Record(tmp_path / "none.jsonl"))


def test_what_other_code_decided_is_simulated_again_when_a_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Bench({ELASTIC: 70, COLOCATED: 60, "sarathi 512 colocated": 30}, path).search()
    append_run(path, Run("d", again=("c",), systems="aligned_slo *"))
    again = Bench({ELASTIC: 90, COLOCATED: 60, "sarathi 512 colocated": 31}, path)
    assert again.search() == [ELASTIC, COLOCATED]  # the splits were abandoned, which no commit is needed for
    (row,) = summary_of(Record(path))["points"]
    assert (row["default"], row["field"]) == (90.0, 30.0)
    assert again.record.first(POINT.name, ELASTIC).num_met == 70


def test_a_picture_has_a_cell_for_every_point() -> None:
    row = {"point": POINT.name, "ahead": -3.2, "default": 90.0, "best": 93.2, "of": "fcfs colocated"}
    drawn = draw([row])
    assert drawn.count("<title>") == 540
    assert "arxiv/1.02/tight/4/be: 90.0 %; fcfs colocated 93.2 %" in drawn
    field = {"field": 45.0, "field_of": "fcfs colocated", "field_gain": 100.0}
    assert ">+100<" in draw_field([row | field])
    assert ">·<" in draw_field([row])


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


@pytest.mark.slow
def test_requests_that_one_of_two_systems_holds_are_told_with_their_workers() -> None:
    point = Point("azure_conv", 1.02, "loose", 2, has_best_effort=False)
    row = compare(point, System("fcfs", Topology.COLOCATED))
    held = Counter(one["holds"] for one in row["requests"])
    assert row["num_met"] - row["num_met_by_other"] == held["default"] - held["other"]
    assert {name for one in row["requests"] for pair in one["workers"] for name in pair.split()} <= {
        "decode-0",
        "decode-1",
    }

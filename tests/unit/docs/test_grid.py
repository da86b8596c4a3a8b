"""The grid: its order, what is simulated at a point and what is not, its record, its summary and its page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from experiments.grid.picture import draw, draw_field
from experiments.grid.points import LOADS, OBJECTIVES, SEEDS, TRACES, Point, all_points
from experiments.grid.record import Outcome, Record, Run, append_run
from experiments.grid.repeats import repeat, sample
from experiments.grid.search import is_searched, search_point
from experiments.grid.summary import summary_of
from experiments.grid.systems import DEFAULT, System, families, others
from experiments.pages import grid as page

POINT = Point("arxiv", 1.02, "tight", 4, has_best_effort=True)
ELASTIC = DEFAULT.name(4)
SARATHI = "sarathi_classed 512 colocated"


class Bench:
    """Simulations whose results are made up: so many of a thousand held by each system, or else a hundred."""

    def __init__(
        self,
        held: Mapping[str, int],
        path: Path,
        of_seeds: Mapping[tuple[int, str], int] | None = None,
        completed: float = 1.0,
    ) -> None:
        self.held = dict(held)
        self.of_seeds = of_seeds or {}
        self.completed = completed
        self.asked: list[str] = []
        self.record = Record(path)

    def search(self) -> list[str]:
        """Return what was simulated for it."""
        self.asked = []
        search_point(POINT, self.record, self._simulated)
        return self.asked

    def row(self) -> dict[str, object]:
        """Return the one point of the summary."""
        (row,) = summary_of(self.record)["points"]
        return dict(row)

    def _simulated(self, point: Point, system: System, least: int) -> Outcome:
        name = system.name(point.accelerators)
        self.asked.append(name if point.seed == SEEDS[0] else f"{name}, seed {point.seed}")
        held = self.of_seeds.get((point.seed, name), self.held.get(name, 100))
        if held < least:
            return Outcome(point.name, name, 1000, at_most=least - 1, ended_s=float(held), code="c")
        return Outcome(
            point.name, name, 1000, num_met=held, completed_of_arrived=self.completed, fluidity=0.5,
            longest_gap_s=float(point.seed), best_effort_tokens_per_s=10.0 * point.seed, code="c",
        )  # fmt: skip


def of_later_seeds(asked: Sequence[str]) -> set[str]:
    """Return the systems that were asked with more than the first seed."""
    return {one.partition(", seed")[0] for one in asked if "seed" in one}


def test_every_block_has_each_combination_once_and_spreads_the_loads() -> None:
    points = all_points()
    assert len(points) == len(set(points)) == 200
    for block in (points[start : start + 20] for start in range(0, 200, 20)):
        assert len({(one.trace, one.objectives, one.has_best_effort) for one in block}) == 20
        assert len({one.accelerators for one in block}) == 1
        assert set(Counter(one.load for one in block).values()) == {4}
    assert len({(one.trace, one.objectives, one.load) for one in points}) == len(TRACES) * len(OBJECTIVES) * len(LOADS)


def test_the_default_and_the_best_of_the_field_have_every_seed(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 700, SARATHI: 500, "fcfs 1 + 3": 495, "fcfs colocated": 480}, tmp_path / "r.jsonl")
    asked = bench.search()
    assert [one for one in asked if one.startswith(ELASTIC)][1:] == [f"{ELASTIC}, seed {seed}" for seed in SEEDS[1:]]
    assert of_later_seeds(asked) == {ELASTIC, SARATHI, "fcfs 1 + 3"}  # within a point of the best
    assert is_searched(POINT, bench.record)
    row = bench.row()
    assert (row["default"], row["best"], row["of"], row["ahead"]) == (70.0, 50.0, SARATHI, 20.0)
    assert (row["default_half"], row["ahead_half"], row["num_seeds"]) == (0.0, 0.0, 5)
    assert (row["gain"], row["contested"], row["knows_classes"]) == (40.0, True, True)
    assert (row["default_gap"], row["default_fluidity"], row["default_be"]) == (5.0, 0.5, 30.0)  # longest, mean, mean


def test_a_system_is_abandoned_once_it_is_sure_to_be_over_a_point_behind_the_best(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 700, SARATHI: 500, "fcfs colocated": 494}, tmp_path / "r.jsonl")
    bench.search()
    lost, near = (bench.record.find(POINT.name, name) for name in ("fcfs 2 + 2", "fcfs colocated"))
    assert lost is not None
    assert near is not None
    assert (lost.at_most, near.at_most) == (494, 494)  # five of 500 are a point


def test_where_the_default_holds_nearly_all_what_is_sure_to_hold_less_is_abandoned(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 995, SARATHI: 970}, tmp_path / "r.jsonl")
    assert of_later_seeds(bench.search()) == {ELASTIC}
    row = bench.row()
    assert "best" not in row
    assert row["contested"] is True
    better = Bench({ELASTIC: 995, SARATHI: 999}, tmp_path / "s.jsonl")
    assert of_later_seeds(better.search()) == {ELASTIC, SARATHI}
    assert better.row()["ahead"] == pytest.approx(-0.4)


def test_a_point_that_all_hold_contests_nothing(tmp_path: Path) -> None:
    held = {system.name(4): 1000 for systems, _ in families(4) for system in systems}
    bench = Bench({ELASTIC: 1000, **held}, tmp_path / "r.jsonl")
    bench.search()
    assert bench.row()["contested"] is False
    totals = summary_of(bench.record)["all"]
    assert (totals["num_contested"], totals["num_open"], totals["num_held"]) == (0, 0, 1)


def test_a_rate_that_is_not_served_is_not_held(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 1000}, tmp_path / "r.jsonl", completed=0.94)
    bench.search()
    totals = summary_of(bench.record)["all"]
    assert (totals["num_held"], totals["num_served"]) == (0, 0)


def test_budgets_and_splits_are_climbed_as_long_as_the_next_does_better(tmp_path: Path) -> None:
    held = {ELASTIC: 700, "sarathi 1024 colocated": 500, "sarathi 2048 colocated": 400, "fcfs 1 + 3": 800}
    bench = Bench({**held, "sarathi 512 colocated": 450}, tmp_path / "r.jsonl")
    asked = bench.search()
    assert [one for one in asked if one.startswith("sarathi ") and "seed" not in one] == [
        f"sarathi {budget} colocated" for budget in (512, 1024, 2048, 256)
    ]
    assert [one for one in asked if one.startswith("fcfs ") and "seed" not in one] == [
        "fcfs colocated", "fcfs 2 + 2", "fcfs 3 + 1", "fcfs 1 + 3",
    ]  # fmt: skip
    row = bench.row()
    assert (row["of"], row["ahead"]) == ("fcfs 1 + 3", -10.0)


def test_all_seeds_together_decide_and_the_interval_is_of_their_differences(tmp_path: Path) -> None:
    of_seeds = {(seed, ELASTIC): 700 + 20 * seed for seed in SEEDS} | {
        (seed, SARATHI): 690 + 20 * seed for seed in SEEDS
    }
    bench = Bench({}, tmp_path / "r.jsonl", of_seeds)
    bench.search()
    row = bench.row()
    assert row["ahead"] == 1.0
    assert row["ahead_half"] == pytest.approx(0.0, abs=1e-9)  # each seed's requests are the same for both
    assert row["default_half"] == pytest.approx(2.776 * (10**0.5) / 5**0.5, rel=1e-3)


def test_what_is_recorded_is_not_simulated_again_unless_it_tells_too_little(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    bench = Bench({ELASTIC: 700, SARATHI: 600}, path)
    append_run(path, Run({"cpu": "some"}))
    bench.search()
    path.write_bytes(path.read_bytes() + b'{"point":"arx')  # interrupted while it wrote
    again = Bench(bench.held, path)
    assert again.search() == []
    assert not is_searched(POINT, Record(tmp_path / "none.jsonl"))
    assert list(Record(path, lambda one: one.code == "other code")) == []
    assert len(list(Record(path, lambda one: one.code == "c"))) == len(list(Record(path)))


def test_what_was_abandoned_for_a_better_one_that_is_not_there_now_is_simulated_again(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 700, SARATHI: 500, "fcfs colocated": 498}, tmp_path / "r.jsonl")
    bench.record.append(Outcome(POINT.name, "fcfs colocated", 1000, at_most=600, code="c"))
    bench.record.append(Outcome(POINT.name, "fcfs 2 + 2", 1000, at_most=400, code="c"))
    asked = bench.search()
    assert "fcfs colocated" in asked
    assert "fcfs 2 + 2" not in asked


def test_the_page_counts_what_is_lost_and_says_how_much_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench({ELASTIC: 700, SARATHI: 750}, tmp_path / "r.jsonl")
    bench.search()
    summary = summary_of(bench.record)
    assert (summary["all"]["num_behind"], summary["all"]["num_ahead"]) == (1, 0)
    monkeypatch.setattr(page, "figures", lambda _: summary)
    assert "**1 of 200 points are done**, ten minutes and 5 seeds each; 1 of them" in " ".join(page.progress().split())
    assert "**1 of 1 (1 of them with the whole interval below 0)**" in " ".join(page.verdict().split())
    (line,) = page.compared().splitlines()[2:]
    assert "| 70.0 ± 0.0 % | 75.0 % | `sarathi_classed 512` | **-5.0 ± 0.0** | -6.7 % |" in line


def test_a_picture_has_a_cell_for_every_point() -> None:
    row = {"point": POINT.name, "ahead": -3.2, "gain": 100.0, "default": 90.0, "best": 93.2, "of": "fcfs colocated"}
    drawn = draw([row])
    assert drawn.count("<title>") == 200
    assert "arxiv/1.02/tight/4/be: 90.0 %; fcfs colocated 93.2 %" in drawn
    assert ">+100<" in draw_field([row])
    assert ">·<" in draw_field([{**row, "best": 99.5}])


def test_the_quickest_outcome_of_each_policy_and_code_is_repeated_and_compared(tmp_path: Path) -> None:
    bench = Bench({ELASTIC: 700, SARATHI: 500, "fcfs 1 + 3": 495}, tmp_path / "r.jsonl")
    bench.search()
    slow, quick, hard = (
        Outcome(POINT.of_seed(seed).name, ELASTIC, 1000, num_met=num_met, cpu_s=cpu_s, code="old")
        for seed, num_met, cpu_s in ((2, 700, 9.0), (3, 700, 1.0), (4, 500, 5.0))
    )
    for one in (slow, quick, hard):
        bench.record.append(one)
    assert sample(bench.record, ["c"]) == [quick, hard]
    alone = Outcome("arxiv/1.02/tight/4/alone", ELASTIC, 1000, num_met=800, cpu_s=9.0, code="old")
    bench.record.append(alone)
    assert sample(bench.record, ["c"]) == [quick, hard, alone]  # what holds with documents beside says nothing of it
    chosen = [quick]

    for num_met, is_same in ((700, True), (701, False)):
        again = Outcome(quick.point, ELASTIC, 1000, num_met=num_met, cpu_s=2.0, code="c")
        (row,) = repeat(chosen, _Again(again).simulated)
        assert (row["system"], row["code"], row["now"], row["is_same"]) == (quick.kind, "old", "c", is_same)


def test_where_all_outcomes_of_a_code_were_abandoned_one_is_abandoned_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "r.jsonl")
    gone = Outcome(POINT.of_seed(3).name, ELASTIC, 1000, at_most=640, ended_s=31.5, code="old")
    record.append(gone)
    (row,) = repeat(sample(record, ["c"]), _Again(gone, least=641).simulated)
    assert row["is_same"]


class _Again:
    def __init__(self, outcome: Outcome, *, least: int = 0) -> None:
        self._outcome, self._least = outcome, least

    def simulated(self, point: Point, system: System, least: int) -> Outcome:
        """Return the outcome, if the case is the one that is to be repeated."""
        assert (point, system, least) == (POINT.of_seed(3), DEFAULT, self._least)
        return self._outcome


def test_forms_without_classes_are_left_out_where_there_is_one_class() -> None:
    alone, beside = (others(4, has_best_effort=has) for has in (False, True))
    assert {one.policy for one in beside.values()} - {one.policy for one in alone.values()} == {"fcfs", "sarathi"}

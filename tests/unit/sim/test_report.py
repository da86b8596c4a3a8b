"""The page about a sweep."""

import os
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from typing_extensions import override

from lab.sim.engine import IterationLine
from lab.sim.report.page import report_page
from lab.sim.report.svg import Scale, from_zero, logarithmic, shown
from lab.sim.report.tables import WINDOW_S, Report, ReportedRun, headlines, steadiness, window_of
from lab.sim.simulation import Simulation
from lab.sim.sweep import Case, CaseProgress, WorkloadLine, run_cases
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.requests import Workload
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload, timed, workload_of
from tests.support.marks import each, slow

NASTY = "<script>alert('x')</script>&\"fcfs\""
VOID = ("meta", "input")


class _Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "style", "onclick")
        ]
        if tag not in VOID:
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"] and self.open[-1:] != ["style"]:
            self.words.append(data)


@pytest.fixture(scope="module")
def runs() -> list[ReportedRun]:
    first, second = (
        Simulation(colocated(timeline_of="worker-0"), mixed_workload(30, rate)).run() for rate in (4.0, 8.0)
    )
    separate = Simulation(disaggregated(timeline_of="decode-0"), mixed_workload(30, 4.0)).run()
    return [
        ReportedRun("first", 4.0, 400, first),
        ReportedRun("first", 8.0, 400, second),
        ReportedRun(NASTY, 4.0, 400, separate),
        ReportedRun(NASTY, 8.0, 400, None, error="<b>broken</b>"),
    ]


@pytest.fixture(scope="module")
def page(runs: list[ReportedRun]) -> str:
    return report_page(Report("A & B", (("command", NASTY),), runs))


@pytest.fixture(scope="module")
def reader(page: str) -> _Reader:
    found = _Reader()
    found.feed(page)
    return found


def test_it_is_well_formed(reader: _Reader, page: str) -> None:
    assert reader.open == []
    assert (reader.tags.count("script"), reader.tags.count("style"), reader.tags.count("h1")) == (1, 1, 1)
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)


def test_it_needs_no_network_and_could_not_use_one(reader: _Reader, page: str) -> None:
    assert reader.links == []
    assert "http:" not in page
    assert "https:" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert policy[1].count("'sha256-") == 2


def test_whatever_has_a_name_is_escaped(reader: _Reader, page: str) -> None:
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert NASTY in "".join(reader.words)
    assert any("<b>broken</b>" in words for words in reader.words)


def test_every_policy_class_and_rate_is_there(reader: _Reader, page: str) -> None:
    words = " ".join(reader.words)
    for name in ("first", "chat", "documents", "decode-0", "prefill-0", "4/s", "8/s"):
        assert name in words
    # Three plots against the rate and two distributions per rate, for all and for either class.
    labels = re.findall(r'aria-label="([^"]*)"', page)
    assert sum(label.endswith("against rate") for label in labels) == 9
    assert sum(label.startswith("distribution") for label in labels) == 12
    assert sum(label.startswith("utilisation") for label in labels) == 2
    assert sum(label.startswith("timeline") for label in labels) == 3
    assert sum(tag == "table" for tag in reader.tags) == 2 + 2 * 5


def test_a_page_about_nothing_is_a_page() -> None:
    empty = Simulation(colocated(), workload_of()).run()
    for runs in ([], [ReportedRun("alone", 0.0, 400, empty)], [ReportedRun("alone", 1.0, 400, None, error="no")]):
        found = _Reader()
        found.feed(report_page(Report("Nothing", (), runs)))
        assert found.open == []


def test_failed_runs_have_a_row(runs: list[ReportedRun]) -> None:
    table = headlines(Report("", (), runs))
    assert table.num_names == 3
    assert len(table.rows) == 4 * 3
    assert [row[3] for row in table.rows if row[0] == NASTY and row[1] == "8"] == ["failed"] * 3
    assert all(len(row) == len(table.headings) for row in table.rows)


def test_stalls_and_queues_have_a_row_for_each_run_and_class(runs: list[ReportedRun]) -> None:
    table = steadiness(Report("", (), runs))
    assert [row[:3] for row in table.rows] == [row[:3] for row in headlines(Report("", (), runs)).rows]
    assert table.headings[-4:] == ("longest gap", "gap over 2 s", "token deadlines met", "completed of sent")
    cells = {tuple(row[3:]) for row in table.rows}
    assert ("–", "–", "–", "–") in cells  # noqa: RUF001  # of those that failed
    assert any(longest.endswith("s") and met.endswith("%") for longest, _, met, _ in cells)


def test_the_window_is_the_middle_of_the_run() -> None:
    lines = [IterationLine(number / 2, (number + 1) / 2, 1, 0, 1) for number in range(100)]
    window = window_of(lines)
    assert (window[0].started_s, window[-1].ended_s, len(window)) == (0.0, WINDOW_S, 16)
    assert window_of(lines[:4]) == lines[:4]
    assert window_of([]) == []


@each(
    ("scale", "ticks"),
    [
        (from_zero([4.0]), [0, 1, 2, 3, 4]),
        (from_zero([]), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0.0, 1.0), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0.02, 0.7, is_log=True), [0.02, 0.05, 0.1, 0.2, 0.5]),
        (Scale(0.001, 50.0, is_log=True), [0.001, 0.01, 0.1, 1, 10]),
        (logarithmic([0.0]), [0.1, 0.2, 0.5, 1.0]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


def test_the_way_along_an_axis() -> None:
    assert Scale(0.1, 10.0, is_log=True).place(1.0) == pytest.approx(0.5)
    assert Scale(0.0, 4.0).place(1.0) == 0.25
    assert (Scale(1.0, 2.0).place(9.0), Scale(1.0, 2.0).place(0.0)) == (1.0, 0.0)


@each(
    ("value", "words"), [(0.0, "0"), (2.0, "2"), (0.05, "0.05"), (1234.5, "1,234"), (0.123456, "0.123"), (10.0, "10")]
)
def test_quantities_have_three_digits(value: float, words: str) -> None:
    assert shown(value) == words


def test_what_was_cached_has_a_column_where_there_was_anything(runs: list[ReportedRun]) -> None:
    chat = build_workload(
        "prompt=20, output=30, turns=2, instruction=100, rate=1", seed=0, library=Library(), num_requests=3
    )
    table = headlines(Report("chat", (), [ReportedRun("fcfs", 1.0, 400, Simulation(colocated(), chat).run())]))
    assert table.headings[-1] == "cached"
    assert 50.0 < float(table.rows[0][-1].removesuffix("%")) < 90.0
    assert "cached" not in headlines(Report("none", (), runs)).headings


# Cases in, results out, whatever happens to one of them.

LINE = WorkloadLine("prompt=uniform(10,200), output=uniform(2,20), rate=20, ttft=1, tpot=0.2", seed=3, num_requests=30)
CASES = [
    Case("fcfs", colocated(), LINE),
    Case("sarathi", colocated(policy="sarathi"), LINE),
    Case("separate", disaggregated(), mixed_workload(20, 10.0)),
]
NEVER_FITS = Case("never", colocated(), workload_of(timed(prompt_len=100_000)))


@dataclass(frozen=True, slots=True)
class Broken(WorkloadLine):
    """A workload that breaks what builds it."""

    exit_code: int | None = None

    @override
    def build(self) -> Workload:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        raise ZeroDivisionError("a bug")


def test_results_come_in_the_order_of_the_cases_and_are_the_same_in_any_number_of_processes() -> None:
    here, elsewhere = run_cases(CASES), run_cases(CASES, processes=2)
    assert [one.case for one in elsewhere] == CASES
    assert [one.error for one in here] == [None] * 3
    assert [one.result for one in here] == [one.result for one in elsewhere]


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_a_case_that_fails_is_a_result_and_the_others_go_on(processes: int) -> None:
    never, broken, fine = run_cases(
        [NEVER_FITS, Case("broken", colocated(), Broken("")), CASES[0]], processes=processes
    )
    assert never.error is not None
    assert "100003 tokens" in never.error
    assert (never.result, never.traceback) == (None, None)
    assert broken.error == "ZeroDivisionError: a bug"
    assert broken.traceback is not None
    assert "in build" in broken.traceback
    assert fine.result is not None


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_case_along() -> None:
    dying = [Case(f"dying {number}", colocated(), Broken("", exit_code=number)) for number in (7, 8)]
    results = run_cases([*dying, *CASES[:2]], processes=2)
    assert [one.error for one in results] == [
        "its process ended (exit code 7)",
        "its process ended (exit code 8)",
        None,
        None,
    ]


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_progress_ends_with_every_case(processes: int) -> None:
    seen: list[CaseProgress] = []
    run_cases([*CASES, NEVER_FITS], processes=processes, progress=seen.append)
    over = [one for one in seen if one.is_done]
    assert sorted(one.name for one in over) == ["fcfs", "never", "sarathi", "separate"]
    assert {one.name: one.num_ended for one in over} == {"fcfs": 30, "never": 0, "separate": 20, "sarathi": 30}
    assert all(one.simulated_s > 0 for one in over if one.name != "never")

"""The table of simulated against live runs is that of the records."""

from benchmarks.simulation.simulated_vs_live import PAGE, SHAPES, range_of, table, with_table
from lab.planning.confidence import THROUGHPUT_RATIOS, TPOT_RATIOS, TTFT_RATIOS


def test_the_table_is_that_of_the_records() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.simulation.simulated_vs_live --page writes it"
    assert table() in text


def test_each_recorded_shape_has_its_two_judged_loads() -> None:
    rows = [row.split(" | ")[:2] for row in table().splitlines()[2:]]
    assert rows
    assert [load for _, load in rows] == ["rate", "lengths"] * (len(rows) // 2)
    assert {shape.strip("| ") for shape, _ in rows} <= {", ".join(shape) for shape in SHAPES}


def test_plans_say_how_far_the_records_are_off() -> None:
    assert range_of("requests/s") == THROUGHPUT_RATIOS
    assert range_of("ttft p50, s", "ttft p90, s") == TTFT_RATIOS
    assert range_of("tpot p50, s", "tpot p90, s") == TPOT_RATIOS

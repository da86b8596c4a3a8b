"""The table of simulated against live runs is that of the records."""

from benchmarks.simulation.live_table import PAGE, SHAPES, table, with_table


def test_the_table_is_that_of_the_records() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.simulation.live_table writes it"
    assert table() in text


def test_every_shape_has_its_two_judged_loads() -> None:
    rows = table().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [
        f"{model}, {topology}" for model, topology in SHAPES for _ in range(2)
    ]

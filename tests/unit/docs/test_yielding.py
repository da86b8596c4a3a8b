"""The table of passes that stop is that of its record."""

from benchmarks.measuring.recording import read_figures
from benchmarks.promise.yielding import PAGE, RECORD, table, with_table


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.promise.yielding --page writes it"
    assert table(read_figures(RECORD)["topologies"]) in text

"""The table of two models on the same cores is that of its record."""

from benchmarks.measuring.recording import read_figures
from benchmarks.promise.other_models import PAGE, RECORD, table, with_table


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.promise.other_models --page writes it"
    assert table(read_figures(RECORD)) in text

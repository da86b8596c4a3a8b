"""The table of random certificates is that of its record."""

from benchmarks.measuring.recording import read_figures
from benchmarks.promise.random_certificates import PAGE, RECORD, table, with_table


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.promise.random_certificates --page writes it"
    assert table(read_figures(RECORD)) in text

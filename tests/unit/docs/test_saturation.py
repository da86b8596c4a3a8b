"""The table of chat that fills a separate decode worker is that of its record."""

from benchmarks.measuring.recording import read_figures
from experiments.saturation import PAGE, table, with_table
from experiments.saturation import RECORD as SATURATION


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m experiments.saturation --page writes it"
    assert table(read_figures(SATURATION)) in text

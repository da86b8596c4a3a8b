"""The table of certificates is that of its record."""

from benchmarks.measuring.recording import read_figures
from benchmarks.promise.certificates import MODELS, PAGE, RECORD, table, with_table


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.promise.certificates --page writes it"
    figures = read_figures(RECORD)
    assert all(table(figures, model) in text for model in MODELS)

"""The table of families on the page is that of the code."""

from scripts.model_families import PAGE, with_table


def test_the_table_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m scripts.model_families writes it"

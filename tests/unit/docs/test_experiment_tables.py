"""Tables of the experiments' pages are those of the records."""

import pytest

from experiments.pages.index import PAGES, names_in, page_path, with_tables


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_its_record(page: str) -> None:
    text = page_path(page).read_text()
    assert sorted(names_in(text)) == sorted(PAGES[page])
    assert with_tables(text, PAGES[page]) == text, "python -m experiments.pages writes them"


def test_a_table_is_replaced_and_what_is_around_it_stays() -> None:
    text = "before\n\n<!-- table: one -->\n\n| old |\n|---|\n\nafter\n"
    tables = {"one": lambda: "| new |\n|---|\n| 1 |"}
    assert with_tables(text, tables) == "before\n\n<!-- table: one -->\n\n| new |\n|---|\n| 1 |\n\nafter\n"


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_tables("<!-- table: none -->\n\n", {})

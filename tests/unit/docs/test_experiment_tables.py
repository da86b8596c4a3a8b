"""Tables of the experiments' pages are those of the records."""

import pytest

from experiments.pages import record
from experiments.pages.index import PAGES, names_in, page_path, with_tables
from tests.support.marks import each


@each("page", PAGES)
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


def test_a_record_of_several_commits_says_which_rows_are_of_which(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"policy": "fcfs", "part": "figure 1", "commit": "1111111"},
        {"policy": "bros", "part": "figure 1", "commit": "1111111"},
        {"policy": "bros", "part": "figure 2", "commit": "2222222"},
    ]
    monkeypatch.setattr(record, "figures", lambda _: {"runs": rows})
    assert record.provenance("some").splitlines() == [
        "- `results/some.json` of `1111111`, 2 rows: `bros` (figure 1), `fcfs`",
        "- `results/some.json` of `2222222`, 1 row: `bros` (figure 2)",
    ]


def test_a_record_says_where_schedulers_knew_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"policy": "fcfs", "figure": "11", "commit": commit} for commit in ("d9491f6", "1111111")]
    monkeypatch.setattr(record, "figures", lambda _: {"runs": rows[:1]})
    assert "(schedulers knew [more](leak.md)): all" in record.provenance("some")
    monkeypatch.setattr(record, "figures", lambda _: {"runs": rows[1:]})
    assert record.provenance("some") == "- `results/some.json` of `1111111`, 1 row: all"

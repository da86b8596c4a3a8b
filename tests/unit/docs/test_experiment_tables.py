"""Tables of the experiments' pages are those of the records."""

import pytest

from experiments.pages import record, steady
from experiments.pages.index import PAGES, names_in, page_path, with_tables
from experiments.validity.decision_code import digests
from tests.support.marks import each


@each("page", PAGES)
def test_the_tables_of_a_page_are_those_of_its_record(page: str) -> None:
    text = page_path(page).read_text()
    assert sorted(names_in(text)) == sorted(PAGES[page])
    assert with_tables(text, PAGES[page]) == text, "`make records` writes them"


def test_a_table_is_replaced_and_what_is_around_it_stays() -> None:
    text = "before\n\n<!-- table: one -->\n\n| old |\n|---|\n\nafter\n"
    tables = {"one": lambda: "| new |\n|---|\n| 1 |"}
    assert with_tables(text, tables) == "before\n\n<!-- table: one -->\n\n| new |\n|---|\n| 1 |\n\nafter\n"


def test_a_place_that_was_empty_keeps_what_follows_apart() -> None:
    tables = {"one": lambda: "- new"}
    assert with_tables("<!-- table: one -->\n\nafter\n", tables) == "<!-- table: one -->\n\n- new\n\nafter\n"


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_tables("<!-- table: none -->\n\n", {})


def test_a_record_of_several_codes_says_how_many_rows_are_of_which_and_names_the_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        {"policy": "fcfs", "code": digests()["fcfs"]},
        {"policy": "bros", "code": digests()["bros"]},
        {"policy": "bros", "code": "2222222"},
        {"policy": "bros", "code": ""},
    ]
    of_seeds = [dict[str, object](row, rate=1, seed=seed, sent_s=600.0) for row in rows for seed in range(5)]
    monkeypatch.setattr(record, "figures", lambda _: {"runs": of_seeds})
    assert " ".join(record.provenance("some").split()) == (
        "- **Measured with an older decision code: 5 of 20 rows**: `bros` (5) "
        "- **Measured with a decision code that is not known: 5 of 20 rows**: `bros` (5) "
        "- Of today's decision code: 10 of 20 rows"
    )


def test_rows_that_are_no_rates_are_called_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"policy": "fcfs", "rate": rate, "seed": seed, "sent_s": 600.0, "code": ""}
        for rate, num in ((1, 5), (2, 4))
        for seed in range(num)
    ]
    rows.append({"policy": "bros", "rate": 1, "seed": 1, "sent_s": 60.0, "code": ""})
    monkeypatch.setattr(record, "figures", lambda _: {"runs": rows})
    assert "**Bursts, no rates: 5 of 10 rows**" in record.provenance("some")
    monkeypatch.setattr(record, "figures", lambda _: {"runs": rows[:5]})
    assert "Bursts" not in record.provenance("some")


def _rate(policy: str, seed: int, completed: float, *, sent_s: float = 600.0) -> dict[str, object]:
    figures = {"held": 0.9 + seed / 100, "rt.completed_of_arrived": completed, "rt.fluidity": 0.5}
    labels = {"part": "steady", "rate": 2.0, "policy": policy, "seed": seed, "sent_s": sent_s}
    return labels | figures | {"rt.longest_gap_s": float(seed), "be.loaded_tokens_per_s": 10.0}


def test_a_rate_has_its_interval_and_one_that_is_not_served_stands_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_rate("fcfs", seed, 0.97) for seed in range(1, 6)] + [_rate("bros", seed, 0.9) for seed in range(1, 6)]
    rows += [_rate("few", seed, 1.0) for seed in range(1, 5)]
    rows += [_rate("short", seed, 1.0, sent_s=60.0) for seed in range(1, 6)]
    monkeypatch.setattr(steady, "runs", lambda _: record.Record(rows))
    table = steady.steady("some", "rt", "held")
    assert table.splitlines()[2:] == [
        "| 2 | `fcfs` | 93.0 ± 2.0 % | yes | 97.0 % | 50.0 % | 5.0 s | 10 |",
        "| 2 | `bros` | (93.0 ± 2.0 %) | **no** | 90.0 % | 50.0 % | 5.0 s | 10 |",
    ]
    monkeypatch.setattr(steady, "runs", lambda _: record.Record(rows[10:]))
    assert steady.steady("some", "rt", "held") == "- No rate has been simulated yet"

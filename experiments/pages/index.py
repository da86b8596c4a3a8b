"""Pages whose tables are made from records, and the places of those tables in them."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from experiments.pages import (
    accelgen,
    alignedserve,
    alise,
    apt_serve,
    bros,
    grid,
    stale,
    summary,
    unseen,
)
from experiments.pages.record import provenance

DOCS = Path(__file__).parent.parent.parent / "docs" / "experiments"
Tables = Mapping[str, Callable[[], str]]
_OF_RECORDS: Mapping[str, Tables] = {
    "accelgen": accelgen.TABLES,
    "alignedserve": alignedserve.TABLES,
    "alise": alise.TABLES,
    "apt_serve": apt_serve.TABLES,
    "bros": bros.TABLES,
    "unseen": unseen.TABLES,
}
_TABLES: Mapping[str, Tables] = {
    "README": {**summary.TABLES, "stale": stale.stale},
    "grid": grid.TABLES,
    **{page: {"record": partial(provenance, page), **tables} for page, tables in _OF_RECORDS.items()},
}
PAGES: Mapping[str, Tables] = {page: {"former": stale.former_default, **tables} for page, tables in _TABLES.items()}
_PLACE = re.compile(r"^<!-- table: (?P<name>.+) -->\n\n(?:(?:\||- |  ).*\n)*", re.MULTILINE)


def page_path(page: str) -> Path:
    return DOCS / f"{page}.md"


def names_in(text: str) -> list[str]:
    return [place["name"] for place in _PLACE.finditer(text)]


def with_tables(text: str, tables: Tables) -> str:
    def written(place: re.Match[str]) -> str:
        below = "" if text[place.end() : place.end() + 1] in ("", "\n") else "\n"  # a place that was empty until now
        return f"<!-- table: {place['name']} -->\n\n{tables[place['name']]()}\n{below}"

    return _PLACE.sub(written, text)

"""An experiment's record as its page reads it: rows by their labels, figures as text."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.validity.rows import State, is_stale, num_bursts, states, system_of

RESULTS = Path(__file__).parent.parent / "results"
Row = dict[str, Any]
_WIDTH = 100
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Record:
    """Rows of a record, or those of them that have certain labels."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, **labels: object) -> "Record":
        return Record([row for row in self.rows if all(row.get(name) == value for name, value in labels.items())])

    def __bool__(self) -> bool:
        return bool(self.rows)

    def values(self, figure: str) -> list[float]:
        return [float(row[figure]) for row in self.rows]

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over the rows; there must be some."""
        values = self.values(figure)
        assert values, f"no row has {figure}"
        return sum(values) / len(values)

    def spread(self, figure: str) -> float:
        """Return the largest less the smallest of a figure; of a row that is a mean, the one recorded with it."""
        if len(self.rows) == 1 and f"{figure}.spread" in self.rows[0]:
            return float(self.rows[0][f"{figure}.spread"])
        values = self.values(figure)
        return max(values) - min(values)


@cache
def figures(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def runs(name: str) -> Record:
    return Record(figures(name)["runs"])


# --- figures as text


def share(value: float, digits: int = 1) -> str:
    """Return a percentage; what is less than all is never rounded to 100 %."""
    percent = f"{100 * value:.{digits}f}"
    if float(percent) == 100.0 and value < 1.0:
        percent = f"{100 * value:.1f}" if digits == 0 and value < 0.9995 else "99.9"
    return f"{percent.removesuffix('.0') if float(percent) in (0.0, 100.0) else percent} %"


def change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def seconds(value: float) -> str:
    if value < 0.3:
        return f"{1e3 * value:.0f} ms"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def milliseconds(value: float) -> str:
    return f"{count(1e3 * value)} ms"


def count(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def digits(value: float, num: int = 3) -> str:
    if value == 0:
        return "0"
    text = f"{value:#.{num}g}".removesuffix(".")
    return f"{value:.{num}g}" if "e" in text else text


def bold(text: str) -> str:
    return f"**{text}**"


def bold_best(cells: Sequence[str], values: Sequence[float]) -> list[str]:
    return [bold(cell) if value == max(values) else cell for cell, value in zip(cells, values, strict=True)]


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(headings)
    lines = [head, *map(list, rows)]
    assert all(len(line) == len(head) for line in lines), lines
    body = [f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:]])


def bullets(items: Iterable[str]) -> str:
    """Return a list of a page, in lines of its width; a number keeps its percent sign."""
    kept = [f"- {item}".replace(" %", f"{_NO_BREAK}%") for item in items]
    wrapped = [textwrap.fill(item, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) for item in kept]
    return "\n".join(wrapped).replace(_NO_BREAK, " ")


def provenance(name: str) -> str:
    """Return how many rows of a record are of which decision code; rows that are stale, or no rates, stand out."""
    rows = figures(name)["runs"]
    said = states_of(rows, states(name, rows))
    bursts = num_bursts(rows)
    if bursts:
        reason = "requests sent within less than ten minutes, or fewer than five seeds"
        said.insert(0, f"**Bursts, no rates: {_share_of(bursts, rows)}** ({reason})")
    return bullets(said)


def states_of(rows: Sequence[Row], found: Sequence[State]) -> list[str]:
    """Return how many rows are of each state, and the systems of the stale ones. `found`: the state of each row."""
    counts: dict[State, Counter[str]] = {}
    for row, state in zip(rows, found, strict=True):
        counts.setdefault(state, Counter())[system_of(row)] += 1
    said = []
    for state, of in sorted(counts.items(), key=lambda one: not is_stale(one[0])):
        systems = ", ".join(f"`{system}` ({number})" for system, number in of.most_common())
        text = f"{state.value[0].upper()}{state.value[1:]}: {_share_of(of.total(), rows)}"
        names = "" if of.total() == len(rows) else f": {systems}"  # of all rows no list is needed
        said.append(f"**{text}**{names}" if is_stale(state) else text)
    return said


def _share_of(number: int, rows: Sequence[Row]) -> str:
    return f"all {_num(len(rows), 'row')}" if number == len(rows) else f"{number} of {_num(len(rows), 'row')}"


def _num(value: int, noun: str) -> str:
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"

"""Tables of docs/experiments/slack.md."""

from collections.abc import Callable, Mapping

from experiments.pages.record import (
    bullets,
    change,
    count,
    figures,
    share,
    table,
)

_SYSTEMS = ("aligned, packed", "aligned", "distserve")
_NOT_YET = bullets(["Not simulated yet"])


def gains() -> str:
    """Return, for each point, the tokens of each system at the highest of its rates that holds the TPOT."""
    rows = []
    for row in figures("slack")["gains"]:
        cells = [count(row[name]) if row.get(name) is not None else "-" for name in _SYSTEMS]
        gain = row.get("gain")
        rows.append([_named(row["part"]), share(row["level"], 0), *cells, "-" if gain is None else change(1 + gain)])
    if not rows:
        return _NOT_YET
    return table(
        ["", "requests that hold it", *(f"tokens/s: {name}" for name in _SYSTEMS), "packed by DistServe"], rows
    )


def _named(part: str) -> str:
    return part.replace("tpot ", "TPOT ").replace("+", " + ")


TABLES: Mapping[str, Callable[[], str]] = {"gains": gains}

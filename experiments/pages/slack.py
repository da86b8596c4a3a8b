"""Tables of docs/experiments/slack.md."""

from collections.abc import Callable, Mapping

from benchmarks.measuring.intervals import interval
from experiments.pages.record import (
    Record,
    bold,
    bullets,
    change,
    count,
    figures,
    milliseconds,
    runs,
    seconds,
    share,
    table,
)
from experiments.steady import is_served

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


def rates() -> str:
    """Return a row for each point, rate and system."""
    record, lines = runs("slack"), []
    points = dict.fromkeys((row["part"], row["rate"], row["system"]) for row in record.rows)
    order = sorted(points, key=lambda point: (point[0], point[1], _SYSTEMS.index(point[2])))
    for part, rate, system in order:
        lines.append([_named(part), f"{rate:g}", system, *_cells(record.of(part=part, rate=rate, system=system))])
    if not lines:
        return _NOT_YET
    heads = ["", "requests/s", "system", "seeds", "TPOT held", "tokens/s", "served", "p99 TPOT", "longest gap"]
    return table([*heads, "TTFT p50, p99", "batch"], lines)


def _cells(at: Record) -> list[str]:
    tokens = interval(at.values("rt.loaded_tokens_per_s"))
    completed = at.values("rt.completed_of_arrived")
    return [
        str(len(at.rows)),
        share(at.mean("rt.tpot_attainment")),
        f"{count(tokens.mean)} ± {count(tokens.half)}" if tokens.half else count(tokens.mean),
        share(sum(completed) / len(completed))
        if is_served(completed)
        else bold(share(at.mean("rt.completed_of_arrived"))),
        milliseconds(at.mean("rt.tpot_s.p99")),
        seconds(max(at.values("rt.longest_gap_s"))),
        f"{seconds(at.mean('rt.ttft_s.p50'))}, {seconds(at.mean('rt.ttft_s.p99'))}",
        count(at.mean("ledger.batch")),
    ]


def _named(part: str) -> str:
    return part.replace("tpot ", "TPOT ").replace("+", " + ")


TABLES: Mapping[str, Callable[[], str]] = {"gains": gains, "rates": rates}

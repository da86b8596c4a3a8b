"""Tables of rates: ten minutes and five seeds, with 95 % intervals, and what attainment alone hides."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measuring.intervals import interval
from experiments.pages.record import Record, bold, bullets, digits, runs, seconds, share, table
from experiments.steady import LEAST_SEEDS, is_long, is_served

_PART = "steady"


class SteadyFigures(NamedTuple):
    """What a page's table of rates shows."""

    of: str  # the class of traffic
    held: str  # the figure by which a request counts
    other: str  # one more, as a number
    heading: str  # its name


def steady(page: str, figures: SteadyFigures) -> str:
    """Return a row for each rate and policy that has all seeds; one that is not served holds nothing."""
    record = runs(page).of(part=_PART)
    points = dict.fromkeys((row["rate"], row["policy"]) for row in record.rows)
    lines = []
    for rate, policy in sorted(points, key=lambda point: point[0]):
        at = record.of(rate=rate, policy=policy)
        if len(at.rows) >= LEAST_SEEDS and all(map(is_long, at.rows)):
            lines.append([f"{rate:g}", f"`{policy}`", *_cells(at, figures)])
    if not lines:
        return bullets(["No rate has been simulated yet"])
    head = ["requests/s", "policy", "held", "served", "completed of sent", "token deadlines met", "longest gap"]
    return table([*head, figures.heading, "best-effort tokens/s"], lines)


def _cells(at: Record, figures: SteadyFigures) -> list[str]:
    completed = at.values(f"{figures.of}.completed_of_arrived")
    is_kept = is_served(completed)
    beside = [row.get("be.loaded_tokens_per_s") for row in at.rows]
    known = [float(value) for value in beside if value is not None]
    return [
        percent(at.values(figures.held)) if is_kept else f"({percent(at.values(figures.held))})",
        "yes" if is_kept else bold("no"),
        percent(completed),
        percent(at.values(f"{figures.of}.fluidity")),
        seconds(max(at.values(f"{figures.of}.longest_gap_s"))),
        _number(at.values(figures.other)),
        _number(known) if known else "-",
    ]


def percent(values: Sequence[float]) -> str:
    """Return the mean of shares over seeds, with its interval."""
    found = interval(values)
    return share(found.mean) if not found.half else f"{100 * found.mean:.1f} ± {100 * found.half:.1f} %"


def _number(values: Sequence[float]) -> str:
    found = interval(values)
    return digits(found.mean) if not found.half else f"{digits(found.mean)} ± {digits(found.half, 2)}"

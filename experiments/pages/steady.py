"""Tables of rates: ten minutes and five seeds, with 95 % intervals, and what attainment alone hides."""

from collections.abc import Sequence

from benchmarks.measuring.intervals import interval
from experiments.pages.record import Record, bold, bullets, count, runs, seconds, share, table
from experiments.steady import LEAST_SEEDS, is_long, is_served

_PART = "steady"


def steady(page: str, of: str, held: str) -> str:
    """Return a row for each rate and policy that has all seeds; one that is not served holds nothing.

    `of`: the class of traffic; `held`: the figure by which a request counts.
    """
    record = runs(page).of(part=_PART)
    points = dict.fromkeys((row["rate"], row["policy"]) for row in record.rows)
    lines = []
    for rate, policy in sorted(points, key=lambda point: point[0]):
        at = record.of(rate=rate, policy=policy)
        if len(at.rows) >= LEAST_SEEDS and all(map(is_long, at.rows)):
            lines.append([f"{rate:g}", f"`{policy}`", *_cells(at, of, held)])
    if not lines:
        return bullets(["No rate has been simulated yet"])
    head = ["requests/s", "policy", "held", "served", "completed of sent", "token deadlines met", "longest gap"]
    return table([*head, "best-effort tokens/s"], lines)


def _cells(at: Record, of: str, held: str) -> list[str]:
    completed = at.values(f"{of}.completed_of_arrived")
    is_kept = is_served(completed)
    beside = [row.get("be.loaded_tokens_per_s") for row in at.rows]
    known = [float(value) for value in beside if value is not None]
    return [
        percent(at.values(held)) if is_kept else f"({percent(at.values(held))})",
        "yes" if is_kept else bold("no"),
        share(at.mean(f"{of}.completed_of_arrived")),
        share(at.mean(f"{of}.fluidity")),
        seconds(max(at.values(f"{of}.longest_gap_s"))),
        count(sum(known) / len(known)) if known else "-",
    ]


def percent(values: Sequence[float]) -> str:
    found = interval(values)
    return share(found.mean) if not found.half else f"{100 * found.mean:.1f} ± {100 * found.half:.1f} %"

"""Table of docs/experiments/README.md: what the rows of each page are of."""

from collections import Counter

from experiments.pages.record import bold, figures, table
from experiments.validity.rows import State, is_stale, num_bursts, states

_PAGES = ("alignedserve", "bros", "accelgen", "alise", "apt_serve", "leak", "unseen")


def stale() -> str:
    """Return, for each page, how many rows are of which code, and how many are rates."""
    lines = []
    for page in _PAGES:
        rows = figures(page)["runs"]
        counts = Counter(states(page, rows))
        num_stale = sum(count for state, count in counts.items() if is_stale(state))
        verdict = "no" if num_stale == 0 else bold("all") if num_stale == len(rows) else bold("in part")
        numbers = (len(rows), *(counts[state] for state in State), len(rows) - num_bursts(rows))
        lines.append([f"[{page}]({page}.md)", verdict, *map(str, numbers)])
    return table(["page", "stale", "rows", "today's", "sample repeated", "older", "unknown", "rates"], lines)

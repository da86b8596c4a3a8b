"""Table of docs/experiments/README.md: what the rows of each page are of."""

from collections import Counter
from collections.abc import Sequence

from experiments.common import Row
from experiments.pages import grid
from experiments.pages.record import bold, figures, table
from experiments.validity.rows import State, is_stale, num_bursts, states

GRID = "grid"
PAGES = (
    *("alignedserve", "bros", "accelgen", "alise", "apt_serve", "leak", "unseen", "separation", "slack", "ablations"),
    "walls",
    GRID,
)


def rows_of(page: str) -> Sequence[Row]:
    """Return the rows of a page's record."""
    rows: Sequence[Row] = grid.rows() if page == GRID else figures(page)["runs"]
    return rows


def stale() -> str:
    """Return, for each page, how many rows are of which code, and how many are rates."""
    lines = []
    for page in PAGES:
        rows = rows_of(page)
        counts = Counter(states(page, rows))
        num_stale = sum(count for state, count in counts.items() if is_stale(state))
        verdict = "no" if num_stale == 0 else bold("all") if num_stale == len(rows) else bold("in part")
        numbers = (len(rows), *(counts[state] for state in State), len(rows) - num_bursts(rows))
        lines.append([f"[{page}]({page}.md)", verdict, *map(str, numbers)])
    return table(["page", "stale", "rows", "today's", "sample repeated", "older", "unknown", "rates"], lines)

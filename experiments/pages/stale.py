"""Table of docs/experiments/README.md: what the rows of each page are of."""

from collections.abc import Sequence

from experiments.common import Row
from experiments.pages import grid
from experiments.pages.record import bold, bullets, figures, table
from experiments.validity.rows import is_stale, num_bursts, states

GRID = "grid"
PAGES = (
    *("alignedserve", "bros", "accelgen", "alise", "apt_serve", "leak", "unseen", "separation", "slack", "ablations"),
    "walls",
    GRID,
)


def rows_of(page: str) -> Sequence[Row]:
    rows: Sequence[Row] = grid.rows() if page == GRID else figures(page)["runs"]
    return rows


def former_default() -> str:
    return bullets(
        ["**Rows of `aligned_slo` were measured with the former default policy, and will be measured anew.**"]
    )


def stale() -> str:
    lines = []
    for page in PAGES:
        rows = rows_of(page)
        num_stale = sum(map(is_stale, states(page, rows)))
        rates = len(rows) - num_bursts(rows)
        lines.append([f"[{page}]({page}.md)", str(len(rows)), bold(str(num_stale)) if num_stale else "0", str(rates)])
    return table(["page", "rows", "stale", "rates"], lines)

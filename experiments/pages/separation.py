"""Tables of docs/experiments/separation.md."""

from collections.abc import Sequence
from statistics import mean

from experiments.common import Row
from experiments.pages.record import bold, bullets, figures, table
from experiments.separation import BEHIND, NAME, PARTS


def compared() -> str:
    """Return every point with the measured costs."""
    head = [
        "point",
        "elastic",
        "colocated",
        "best split",
        "ahead",
        "of colocated",
        "seeds",
    ]
    return table(head, map(_cells, _of("calibrated")))


def _cells(row: Row) -> list[str]:
    split = f"{row['split']}: " + (f"{row['split_held']:.1f} %" if row["split_held"] is not None else "abandoned")
    return [
        row["point"],
        f"{row['elastic']:.1f} %",
        f"{row['colocated']:.1f} %",
        split,
        _lead(row["ahead"], row["ahead_half"], f"{row['num_abandoned']} of {row['num_seeds']}"),
        _lead(row["of_colocated"], row["of_colocated_half"]),
        str(row["num_seeds"]),
    ]


def _lead(lead: float | None, half: float | None, abandoned: str = "") -> str:
    if lead is None:
        return f"over {100 * BEHIND:.0f}" + (f" ({abandoned} seeds)" if abandoned != "1 of 1" else "")
    said = f"{lead:+.1f}" + (f" ± {half:.1f}" if half is not None else "")
    return bold(said) if lead < 0.0 else said


def verdict() -> str:
    """Return, for each part, who is ahead at how many points."""
    return bullets(_said(part, rows) for part in PARTS if (rows := _of(part)))


def _of(part: str) -> Sequence[Row]:
    return [row for row in figures(NAME)["compared"] if row["part"] == part]


def _said(part: str, rows: Sequence[Row]) -> str:
    behind = [row for row in rows if row["ahead"] is not None and row["ahead"] + (row["ahead_half"] or 0.0) < 0.0]
    near = [row for row in rows if row["ahead"] is not None and row not in behind and row["ahead"] < 1.0]
    lost = [row for row in rows if row["ahead"] is None]
    leads = [row["of_colocated"] for row in rows]
    return (
        f"`{part}`, {len(rows)} points ({sum(row['contested'] for row in rows)} of them below 99 % with elastic "
        f"workers): the best split is ahead of elastic workers at **{len(behind)}**, within a point at {len(near)}, "
        f"over {100 * BEHIND:.0f} points behind with some seed at {len(lost)}; elastic workers are "
        f"{mean(leads):+.1f} points ahead of colocated ones in the mean ({min(leads):+.1f} to {max(leads):+.1f})"
    )


TABLES = {"compared": compared, "verdict": verdict}

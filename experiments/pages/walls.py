"""Tables of docs/experiments/walls.md."""

from collections.abc import Callable, Mapping

from experiments.common import Row
from experiments.pages.record import bold, figures, table
from experiments.walls import NAME, SYSTEMS, half_of


def compared() -> str:
    """Return what elastic workers hold and miss at every point, and what the others hold more."""
    head = ["costs", "point", "elastic", "first token late", "gaps alone late", *SYSTEMS[1:], "seeds"]
    return table(head, map(_cells, figures(NAME)["compared"]))


def _cells(row: Row) -> list[str]:
    missed = [f"{row[name]:.1f}" for name in ("late_first", "late_gaps")]
    gains = [_gain(row[system], row[half_of(system)]) for system in SYSTEMS[1:]]
    return [row["part"], row["point"], f"{row['held']:.1f} %", *missed, *gains, _seeds(row)]


def _seeds(row: Row) -> str:
    least, most = row["least_seeds"], row["num_seeds"]
    return str(most) if least == most else f"{least} to {most}"


def _gain(gain: float | None, half: float | None) -> str:
    if gain is None:
        return "-"
    said = f"{gain:+.1f}" + (f" ± {half:.1f}" if half is not None else "")
    return bold(said) if half is not None and gain > half else said


TABLES: Mapping[str, Callable[[], str]] = {"compared": compared}

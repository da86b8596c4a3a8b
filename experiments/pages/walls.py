"""Tables of docs/experiments/walls.md."""

from collections.abc import Callable, Mapping

from experiments.common import Row
from experiments.pages.record import bold, count, figures, table
from experiments.walls import ACCELERATORS, NAME, SYSTEMS, half_of


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


def rooms() -> str:
    """Return the prompt tokens per second that there is time for, by the workers that the decodes are on."""
    on = range(1, ACCELERATORS + 1)
    head = ["costs", "gap", "decodes", *(f"on {num}" for num in on)]
    cells = (
        [
            row["part"],
            f"{1e3 * row['gap_s']:.0f} ms",
            str(row["num_decodes"]),
            *_rates([row[f"on_{num}"] for num in on]),
        ]
        for row in figures(NAME)["rooms"]
    )
    return table(head, cells)


def _rates(rates: list[float | None]) -> list[str]:
    most = max(rate or 0.0 for rate in rates)
    cells = ["-" if rate is None else count(rate) for rate in rates]
    return [bold(cell) if rate == most else cell for cell, rate in zip(cells, rates, strict=True)]


TABLES: Mapping[str, Callable[[], str]] = {"compared": compared, "rooms": rooms}

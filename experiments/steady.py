"""What a figure needs to be called a rate: time enough, seeds enough, and as many completions as arrivals."""

from collections.abc import Iterable
from typing import Any

LEAST_S = 600.0  # of arrivals
LEAST_SEEDS = 5
LEAST_COMPLETED = 0.95  # of arrivals, after the first fifth of their time


def is_long(row: dict[str, Any]) -> bool:
    return float(row.get("sent_s") or 0.0) >= LEAST_S


def is_served(completed_of_arrived: Iterable[float]) -> bool:
    """Return whether the rate is served: by the mean over its seeds, completions keep up with arrivals."""
    values = list(completed_of_arrived)
    return sum(values) / len(values) >= LEAST_COMPLETED

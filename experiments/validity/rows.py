"""Which rows of a record still hold: of today's code, or of an older one of which a sample was repeated."""

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.steady import LEAST_SEEDS, is_long
from experiments.validity.decision_code import digests

RESULTS = Path(__file__).parents[1] / "results"
REPEATED = RESULTS / "repeated.json"
_NOT_OF_A_POINT = ("seed", "code", "knew_more")  # of the labels of a row


class State(enum.Enum):
    """What a row is of."""

    TODAY = "of today's decision code"
    REPEATED = "of an older decision code that decides a repeated sample as today's does"
    OLDER = "measured with an older decision code"
    UNKNOWN = "measured with a decision code that is not known"


Repeat = Mapping[str, Any]
"""One row that was simulated again: its system and code, the code of today, and whether figures are the same."""


@cache
def repeats(page: str) -> Sequence[Repeat]:
    found: dict[str, list[Repeat]] = json.loads(REPEATED.read_text()) if REPEATED.exists() else {}
    return found.get(page, [])


def told_today(page: str) -> list[Repeat]:
    return [one for one in repeats(page) if one["now"] in digests().values()]


def system_of(row: Mapping[str, Any]) -> str:
    """Return what a row is of: a policy, or one with other settings."""
    return str(row.get("system") or row["policy"])


def state_of(row: Mapping[str, Any], repeated: Sequence[Repeat], today: Iterable[str]) -> State:
    code, now = row.get("code"), set(today)
    if not code:
        return State.UNKNOWN
    if code in now:
        return State.TODAY
    of_row = [one for one in repeated if (one["system"], one["code"]) == (system_of(row), code) and one["now"] in now]
    return State.REPEATED if of_row and all(one["is_same"] for one in of_row) else State.OLDER


def states(page: str, rows: Sequence[Mapping[str, Any]]) -> list[State]:
    return [state_of(row, repeats(page), digests().values()) for row in rows]


def is_stale(state: State) -> bool:
    return state in (State.OLDER, State.UNKNOWN)


def num_bursts(rows: Sequence[Mapping[str, Any]]) -> int:
    """Count the rows that are no rates: sent within less than ten minutes, or at a point of fewer than five seeds."""
    seeds = Counter(_point_of(row) for row in rows)
    return sum(not is_long(dict(row)) or seeds[_point_of(row)] < LEAST_SEEDS for row in rows)


def _point_of(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    given = ("rate", "cv", "wave", "num_requests", "sent_s")
    return tuple(
        (name, str(value))
        for name, value in row.items()
        if name not in _NOT_OF_A_POINT and (isinstance(value, str) or name in given)
    )

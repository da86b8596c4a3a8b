"""Whose turn a grammar waits for, until it is tried (trials.py)."""

from typing import NamedTuple


class TrialTurn(NamedTuple):
    """A tenant, and a class of its requests."""

    tenant: str = ""
    is_real_time: bool = True  # somebody waits for the answer


ALONE = TrialTurn()

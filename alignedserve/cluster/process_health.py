"""The health of a process, as the driver knows it: whether it serves, and if not, why."""

from dataclasses import dataclass
from enum import Enum, auto


class ProcessState(Enum):
    """The state of a process, as its answers show it."""

    STARTING = auto()  # no answer since it was created, or started again
    UP = auto()
    FAILED = auto()  # it answers with the reason for which it serves nothing
    ENDED = auto()  # Ray starts it again
    DEAD = auto()  # Ray does not


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a process."""

    state: ProcessState = ProcessState.STARTING
    problem: str = ""  # for which it does not start, in one line

"""Decides when processes that do not serve are started again: pure, by what each last said of itself.

The life of a process that does not start:
1. It is FAILED, or DEAD after an unexpected error. It is noted with the reason.
2. After a pause, which doubles with every failed start, it is started again. Meanwhile the others serve.
3. It is UP: nothing is noted any more. When it has been up for a minute its next failure is a first one again.

One that has ENDED is Ray's to start again, at once; it is noted until it is up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class ProcessState(Enum):
    """The state of a process by its last answer."""

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


STARTS_AGAIN = "its process has ended and starts again"
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 160.0
SETTLED_S = 60.0
_FEW_FAILURES = 1  # failed starts, after which the next one may well succeed
_MAX_DOUBLINGS = 16  # more than the longest pause has; no power of thousands of failed starts


@dataclass(slots=True)
class _Trouble:
    num_failed: int = 0
    problem: str = ""
    is_noted: bool = False  # it has not started again since
    due_s: float | None = None
    pause_s: float = 0.0
    up_s: float | None = None  # since when it is up


class Restarts:
    """The processes of one cluster that do not serve."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}

    @property
    def problems(self) -> Mapping[str, str]:
        return {name: _said(trouble) for name, trouble in self._troubles.items() if trouble.up_s is None}

    @property
    def failing(self) -> frozenset[str]:
        troubles = self._troubles.items()
        return frozenset(name for name, fault in troubles if fault.up_s is None and fault.num_failed > _FEW_FAILURES)

    def look(self, healths: Mapping[str, Health], now: float) -> list[str]:
        """Return the processes that are to be started again now; each counts as starting from then on. `healths`: of
        all processes that there are."""
        self._troubles = {name: fault for name, fault in self._troubles.items() if name in healths}
        for name, health in healths.items():
            self._note(name, health, now)
        due = [name for name, fault in self._troubles.items() if fault.due_s is not None and now >= fault.due_s]
        for name in due:
            trouble = self._troubles[name]
            trouble.due_s, trouble.is_noted = None, False
        return due

    def _note(self, name: str, health: Health, now: float) -> None:
        trouble = self._troubles.get(name)
        match health.state:
            case ProcessState.STARTING:
                if trouble is not None:
                    trouble.due_s, trouble.is_noted = None, False
                return
            case ProcessState.UP:
                if trouble is not None:
                    self._is_up(name, trouble, now)
                return
        if trouble is None:
            trouble = self._troubles[name] = _Trouble()
        trouble.up_s = None
        trouble.problem = health.problem or trouble.problem
        if health.state is ProcessState.ENDED:
            trouble.due_s = None  # Ray's to start again
        elif not trouble.is_noted or trouble.due_s is None:
            trouble.num_failed += not trouble.is_noted
            num_doublings = min(trouble.num_failed - 1, _MAX_DOUBLINGS)
            trouble.pause_s = min(FIRST_PAUSE_S * 2**num_doublings, LONGEST_PAUSE_S)
            trouble.is_noted, trouble.due_s = True, now + trouble.pause_s

    def _is_up(self, name: str, trouble: _Trouble, now: float) -> None:
        trouble.due_s, trouble.is_noted = None, False
        if trouble.up_s is None:
            trouble.up_s = now
        if now - trouble.up_s >= SETTLED_S:
            del self._troubles[name]


def _said(trouble: _Trouble) -> str:
    if not trouble.num_failed:
        return STARTS_AGAIN
    times = "1 failed start" if trouble.num_failed == 1 else f"{trouble.num_failed} failed starts"
    if trouble.due_s is None:
        return f"starts again after {times}: {trouble.problem}"
    return f"{times}, the next {trouble.pause_s:.0f} s after the last: {trouble.problem}"

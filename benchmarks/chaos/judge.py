"""The one judge of all schedules: what a client saw, what is left, and whether that was promised."""

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.schedules import ChaosFault, ChaosSchedule, Hit, Phase, Target

RECOVERS_S = 15.0  # after the last fault has ended, a new request is answered by then
_KILLS = (Hit.KILL, Hit.STATE_FULL, Hit.LOGS_FULL, Hit.MEMORY_FULL)


class Ending(enum.Enum):
    """How an answer ended, as its client saw it."""

    EXACT = "exact"
    REFUSED = "503"  # before its first token, with a time to retry after
    ERROR = "error event"  # in the stream, after what was right
    BROKEN = "connection lost"  # what came before was right
    WRONG = "wrong"  # a token that is not the undisturbed answer's, one too many, or one missing
    HUNG = "hung"


@dataclass(slots=True)
class Outcome:
    """What one schedule led to."""

    endings: dict[str, int] = field(default_factory=dict)  # of streams, by Ending
    messages: list[str] = field(default_factory=list)  # of those that are not exact
    lines_lost: int = 0
    lines_doubled: int = 0
    lines_wrong: int = 0
    batch_status: str = "completed"
    recovered_s: float | None = 0.0  # from the end of the last fault to an exact answer; None: not in time
    held: dict[str, float] = field(default_factory=dict)  # blocks and requests that stayed
    arenas_left: int = 0

    def add(self, ending: Ending, message: str = "") -> None:
        self.endings[ending.value] = self.endings.get(ending.value, 0) + 1
        if message:
            self.messages.append(message[:300])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ending_of(status: int, text: str, expected: str, *, is_done: bool, error: str | None) -> Ending:
    """Return how a stream ended. `is_done`: its last event came; `error`: of the connection, or of an event."""
    if status not in (0, 200):
        return Ending.REFUSED if status == 503 else Ending.WRONG
    if not expected.startswith(text):
        return Ending.WRONG
    if error is not None:
        return Ending.ERROR if error.startswith("{") else Ending.BROKEN
    return Ending.EXACT if is_done and text == expected else Ending.WRONG


def promised_endings(faults: Sequence[ChaosFault]) -> frozenset[Ending]:
    """Return how answers may end under these faults: exact, except at a gateway that is lost or unreachable."""
    promised = {Ending.EXACT}
    for fault in faults:
        is_killed = fault.hit in _KILLS or fault.phase is Phase.STARTING
        if fault.target is Target.GATEWAY and (is_killed or fault.hit is Hit.NO_FILES):
            promised |= {Ending.BROKEN}
        if fault.target in (Target.GATEWAY, Target.ROUTER):
            promised |= {Ending.REFUSED}  # the gateway has no router
    return frozenset(promised)


def problems(schedule: ChaosSchedule, outcome: Outcome) -> list[str]:
    """Return what was not promised; empty: the schedule was survived."""
    allowed = {ending.value for ending in promised_endings(schedule.faults)}
    found = [f"{count} x {ending}" for ending, count in outcome.endings.items() if ending not in allowed]
    counts = ("lines_lost", "lines_doubled", "lines_wrong", "arenas_left")
    found += [f"{name}: {getattr(outcome, name)}" for name in counts if getattr(outcome, name)]
    if outcome.batch_status != "completed":
        found.append(f"batch: {outcome.batch_status}")
    if outcome.recovered_s is None or outcome.recovered_s > RECOVERS_S:
        found.append(f"no answer {RECOVERS_S:.0f} s after the last fault")
    if outcome.held:
        found.append(f"held: {outcome.held}")
    return found

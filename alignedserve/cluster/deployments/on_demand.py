"""Decides which models are in memory where not all fit: uses and demands in, loads and leaves out, no clock.

The life of a model on demand:
1. Asleep: it has no process. Requests that name it wait in line, at the gateways; lines of batches wait in their files.
2. It is loaded: the request that waits longest first, real-time ones before documents. One model at a time changes.
3. If there is no room, another on-demand model leaves first (`_victim`): the one that was used least recently of those
   that nobody uses. Nothing that runs is cut: a model that leaves finishes the requests that it has.
4. Awake: it answers, and leaves when nobody has used it for its `keep_alive`.

Models that are used without a pause would never leave. So one that has documents alone makes room for chat at once,
and others after a turn: TURN_S, or DOCUMENTS_TURN_S where documents wait for a model that chats. Requests to it that
come then wait in their turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TURN_S = 30.0  # that a model has at least, while another one waits for its memory
DOCUMENTS_TURN_S = 600.0  # the same where documents wait and chat is answered
RETRY_S = 30.0  # after which a model that could not be loaded is tried again


@dataclass(frozen=True, slots=True)
class Use:
    """How a model that is awake is used, by all gateways and batches together."""

    num_open: int = 0  # requests that it has
    num_documents: int = 0  # of them, lines of batches
    is_promised: bool = False  # batches have lines for it that wait
    idle_s: float = 0.0  # since its last request, or since it was loaded
    keep_alive_s: float | None = None  # that its last request asked for; None: none did

    @property
    def is_idle(self) -> bool:
        return self.num_open == 0 and not self.is_promised

    @property
    def has_documents_alone(self) -> bool:
        return self.num_open == self.num_documents


@dataclass(frozen=True, slots=True)
class Demand:
    """For how long requests to a model that sleeps have waited, in seconds. None: there are none."""

    real_time_s: float | None = None
    documents_s: float | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        return self.real_time_s is None, -(self.real_time_s or self.documents_s or 0.0)

    @property
    def waited_s(self) -> float:
        return -self.rank[1]


@dataclass(frozen=True, slots=True)
class Load:
    """Command: load this model; `on_refused` follows, or its use."""

    name: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Command: give this model no more requests, and end it once it has answered those that it has."""

    name: str


class OnDemandLogic:
    """The on-demand models of one cluster. Names are those of models, as clients call them."""

    def __init__(self) -> None:
        self._awake_since: dict[str, float] = {}
        self._no_room: set[str] = set()  # that wait for another one to leave
        self._problems: dict[str, tuple[str, float]] = {}  # why one cannot be loaded, and when it is tried again

    def problem(self, name: str, now: float) -> str | None:
        """Return why a model cannot be loaded at present; None: nothing is known to keep it."""
        problem, until_s = self._problems.get(name, ("", now))
        return problem if now < until_s else None

    def on_refused(self, name: str, problem: str, now: float, *, is_full: bool) -> None:
        """Note that a model was not loaded. `is_full`: for want of memory, which another one may leave."""
        if is_full and self._awake_since:
            self._no_room.add(name)
        else:
            self._problems[name] = problem, now + RETRY_S

    def look(
        self,
        awake: Mapping[str, tuple[Use, float]],
        demands: Mapping[str, Demand],
        now: float,
        *,
        is_changing: bool,
    ) -> Sequence[Load | Leave]:
        """Return what is to be done now.

        `awake`: use and `keep_alive` of every on-demand model that serves. `demands`: of those that sleep.
        `is_changing`: one comes or goes already, and the next waits for it.
        """
        self._awake_since = {name: self._awake_since.get(name, now) for name in awake}
        self._no_room &= demands.keys()
        self._problems = {name: one for name, one in self._problems.items() if now < one[1]}
        if is_changing:
            return ()
        return self._for_demands(awake, demands, now) or self._for_keep_alive(awake)

    def _for_demands(
        self, awake: Mapping[str, tuple[Use, float]], demands: Mapping[str, Demand], now: float
    ) -> Sequence[Load | Leave]:
        for name in sorted(demands, key=lambda one: (*demands[one].rank, one)):
            if name in self._problems:
                continue
            if name not in self._no_room:
                return (Load(name),)
            victim = self._victim(demands[name], awake, now)
            if victim is not None:
                self._no_room.clear()  # all of them are tried again once it has left
                return (Leave(victim),)
            if not awake:
                self._no_room.discard(name)
        return ()

    def _for_keep_alive(self, awake: Mapping[str, tuple[Use, float]]) -> Sequence[Leave]:
        for name, (use, keep_alive_s) in awake.items():
            keep_s = keep_alive_s if use.keep_alive_s is None else use.keep_alive_s
            if use.is_idle and use.idle_s >= keep_s:
                return (Leave(name),)
        return ()

    def _victim(self, demand: Demand, awake: Mapping[str, tuple[Use, float]], now: float) -> str | None:
        able = [name for name, (use, _) in awake.items() if use.is_idle]
        if not able:
            able = [name for name, (use, _) in awake.items() if self._is_turn_over(name, use, demand, now)]
        return max(able, key=lambda name: (awake[name][0].idle_s, name), default=None)

    def _is_turn_over(self, name: str, use: Use, demand: Demand, now: float) -> bool:
        is_chat = demand.real_time_s is not None
        if is_chat and use.has_documents_alone:
            return True
        turn_s = TURN_S if is_chat or use.has_documents_alone else DOCUMENTS_TURN_S
        return min(demand.waited_s, now - self._awake_since[name]) >= turn_s

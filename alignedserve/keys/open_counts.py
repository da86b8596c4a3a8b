"""Open requests of each key, counted together for all gateways: never more than the key's limit.

1. A gateway states how many requests of a key it has open, those included that wait to be let in. Statements are
   absolute and numbered: one that is lost, late or repeated counts nothing twice.
2. A request asks with such a statement. It is let in if what all gateways stated last is within the limit.
3. A gateway states what has ended at once, and everything several times a second.
4. Another process of a gateway's name has begun with nothing. Of a gateway that is silent the last statement counts
   for FORGET_S.
5. A state server that has just begun has no answer before all gateways can have told it everything.

A gateway that has had no answer for LEASE_S goes by its equal part of each limit (`share_of_open`) until it has one:
the others may have as many more than the limit meanwhile as that part, and no new one is let in until they are within
it again.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.keys.quotas import LEASE_S

FORGET_S = 60.0


class Wish(NamedTuple):
    """A request of this key asks to be let in; its own gateway has counted it already."""

    key: str
    limit: int


class Verdict(enum.Enum):
    """What becomes of a wish."""

    IN = "in"
    FULL = "full"
    AGAIN = "again"  # nothing can be said yet


@dataclass(frozen=True, slots=True)
class OpenStatement:
    """What a gateway has open."""

    gateway: str
    process_id: str
    number: int  # of this process's statements, larger than those before
    num_open: Mapping[str, int]  # by key
    is_whole: bool  # of keys that are not in it nothing is open; else they are as they were
    wish: Wish | None = None


@dataclass(slots=True)
class _Stated:
    process_id: str
    number: int = -1
    at_s: float = 0.0
    num_open: dict[str, int] = field(default_factory=dict)  # by key, none of them 0

    def take(self, statement: OpenStatement, now: float) -> None:
        self.number, self.at_s = statement.number, now
        if statement.is_whole:
            self.num_open.clear()
        for key, number in statement.num_open.items():
            self.set(key, number)

    def set(self, key: str, number: int) -> None:
        if number > 0:
            self.num_open[key] = number
        else:
            self.num_open.pop(key, None)


class OpenPool:
    """All gateways' statements, as the state server has them. Its clock is its own."""

    def __init__(self, now: float) -> None:
        self._begins_s = now + LEASE_S
        self._stated: dict[str, _Stated] = {}  # by gateway

    def on_statement(self, statement: OpenStatement, now: float) -> Verdict:
        """Take note of a statement; return what becomes of its wish (IN where it has none).

        What is not let in is not counted: the gateway takes it back when it hears of it.
        """
        stated = self._stated.get(statement.gateway)
        if stated is None or stated.process_id != statement.process_id:
            stated = self._stated[statement.gateway] = _Stated(statement.process_id)
        if statement.number <= stated.number:
            return Verdict.AGAIN
        stated.take(statement, now)
        wish = statement.wish
        if wish is None:
            return Verdict.IN
        verdict = self._verdict(wish, now)
        if verdict is not Verdict.IN:
            stated.set(wish.key, stated.num_open.get(wish.key, 0) - 1)
        return verdict

    def num_open(self, key: str, now: float) -> int:
        """Return how many requests of a key are open, as far as it is known."""
        return sum(counts.num_open.get(key, 0) for counts in self._stated.values() if now - counts.at_s < FORGET_S)

    def _verdict(self, wish: Wish, now: float) -> Verdict:
        if now < self._begins_s:
            return Verdict.AGAIN
        return Verdict.IN if self.num_open(wish.key, now) <= wish.limit else Verdict.FULL


class OpenCounts:
    """A gateway's own count, and its statements. Its clock is its own."""

    def __init__(self, gateway: str, process_id: str, now: float) -> None:
        self._gateway = gateway
        self._process_id = process_id
        self._number = 0
        self._open: dict[str, int] = {}  # by key, none of them 0
        self._ended: set[str] = set()  # keys of which that was not stated yet
        self._heard_s = now

    def of(self, key: str) -> int:
        """Return how many requests of a key are open here, those included that wait to be let in."""
        return self._open.get(key, 0)

    def begin(self, key: str) -> None:
        """Count a request as open."""
        self._open[key] = self.of(key) + 1

    def end(self, key: str) -> None:
        """Count it as open no more."""
        number = self.of(key) - 1
        assert number >= 0, "a request that ends twice"
        self._ended.add(key)
        if number:
            self._open[key] = number
        else:
            del self._open[key]

    @property
    def has_ended(self) -> bool:
        """Return whether there is an end to be stated."""
        return bool(self._ended)

    def whole(self) -> OpenStatement:
        """Return a statement of everything."""
        self._ended.clear()
        return self._statement(dict(self._open), is_whole=True)

    def ended(self) -> OpenStatement:
        """Return a statement of the keys of which requests have ended since the last one."""
        keys, self._ended = sorted(self._ended), set()
        return self._statement({key: self.of(key) for key in keys})

    def asking(self, wish: Wish) -> OpenStatement:
        """Return a statement that asks for a request that `begin` has counted."""
        self._ended.discard(wish.key)
        return self._statement({wish.key: self.of(wish.key)}, wish=wish)

    def on_answer(self, now: float) -> None:
        """Take note that there was an answer to a statement."""
        self._heard_s = max(self._heard_s, now)

    def is_cut_off(self, now: float) -> bool:
        """Return whether this gateway is on its own."""
        return now - self._heard_s >= LEASE_S

    def _statement(
        self, num_open: Mapping[str, int], *, is_whole: bool = False, wish: Wish | None = None
    ) -> OpenStatement:
        self._number += 1
        return OpenStatement(self._gateway, self._process_id, self._number, num_open, is_whole, wish)

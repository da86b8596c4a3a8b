"""Evens out the leans of elastic workers: the shares of their time that decodes leave for prompts.

A worker measures its lean: 1 less the time that an iteration of its decodes takes, over the gap that they allow. One
at 1 has nothing but prompts to compute, one at 0 has no time for any. A prompt goes to the worker with the fewest
tokens before it (placement.py), and is decoded there, unless the leans of a node drift apart: then its worker with the
least time for prompts, if any wait there or its decodes fill all of it, hands those that came to it last over to the
one with the most time and no prompt.
No ping-pong: the receiver never gets more decodes than the giver keeps; a request is handed over `MAX_MOVES` times at
most; and a worker that has given or taken is left alone for `REST_S`, by when both have told their leans.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from router.state import TrackedRequest, WorkerRecord

MAX_MOVES = 2
REST_S = 1.0
_APART = 0.25  # leans that differ by less are left alone
_SHORT = 0.125  # a worker with a smaller lean gives even if no prompt waits there: its decodes fill their gaps
_SHARE = 0.25  # of the giver's decodes for each 1.0 of difference, moved at a time


class PlannedMove(NamedTuple):
    """A request to be handed over."""

    tracked: TrackedRequest
    receiver: WorkerRecord


class Leans:
    """Chooses which decodes move, and where to."""

    def __init__(self) -> None:
        self._rests_until_s: dict[str, float] = {}

    def moves(
        self, workers: Iterable[WorkerRecord], requests: Mapping[RequestId, TrackedRequest], now: float
    ) -> list[PlannedMove]:
        """Return the next moves: on each node, between the two of its workers that are furthest apart.

        A worker with nothing that may leave keeps no other from giving.
        """
        rested: dict[str, list[WorkerRecord]] = {}
        for one in workers:
            if one.registered.can_move and self._rests_until_s.get(one.name, 0.0) <= now:
                rested.setdefault(one.registered.pool_name, []).append(one)
        planned = [move for near in rested.values() for move in _moves_among(near, requests)]
        if planned:
            self._rests_until_s = {name: until_s for name, until_s in self._rests_until_s.items() if until_s > now}
        for tracked, receiver in planned:
            self._rests_until_s[tracked.holder or ""] = self._rests_until_s[receiver.name] = now + REST_S
        return planned


def _moves_among(near: Collection[WorkerRecord], requests: Mapping[RequestId, TrackedRequest]) -> list[PlannedMove]:
    able = [one for one in near if one.can_take_over and not one.prefilling]
    receiver = max(able, key=lambda one: (one.lean, one.name), default=None)
    if receiver is None:
        return []
    givers = [one for one in near if one.prefilling or one.lean < _SHORT]
    for giver in sorted(givers, key=lambda one: (one.lean, one.name)):
        if receiver.lean - giver.lean < _APART:
            break
        surplus = len(giver.decoding) - len(receiver.decoding)
        count = min(max(int((receiver.lean - giver.lean) * _SHARE * len(giver.decoding)), 1), surplus // 2)
        movable = [one for one in map(requests.__getitem__, giver.decoding) if _is_movable(one)] if count > 0 else []
        if movable:
            movable.sort(key=lambda one: (-one.request.arrival_s, one.request.request_id))
            return [PlannedMove(one, receiver) for one in movable[:count]]
    return []


def _is_movable(tracked: TrackedRequest) -> bool:
    return tracked.stage is Stage.DECODING and tracked.destination is None and tracked.num_moves < MAX_MOVES

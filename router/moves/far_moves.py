"""Decodes that move to another node, where no worker of their own has time for them.

What leans.py decides within a node holds here as well, with more caution, as blocks go over a network:

- The two are further apart: half of their time. Nothing moves on their own nodes at that moment. Memory alone is no
  reason.
- The wish for a move holds for `HELD_S` before anything moves. Meanwhile the two link. A giver keeps to the receiver
  that it was promised to, as long as that one has more time by as much.
- Both rest for `FAR_REST_S` afterwards.
- What a move takes is forecast from what the link took for a block so far: less than computing the request again takes
  the receiver, and at most a tenth of the time that is left of an answer with a gap to hold. All that moves at once
  takes at most `MOST_S`. Over a link of which nothing is known one request moves, and tells.

Example: a block takes 1 ms from a to b, and a request has 90 of them: 90 ms. Its prompt of 1 400 tokens takes b 280 ms
at 5 000 a second, and it has 300 tokens left with gaps of 50 ms: it moves, and with it as many as take 500 ms in all.
"""

from collections.abc import Collection, Iterable
from itertools import chain, islice

from typing_extensions import override

from alignedserve.costmodel.hardware import LearnedLinks
from router.moves.leans import Leans, Pair, PlannedMove, Requests, blocks_of, moves_for_time
from router.state import TrackedRequest, WorkerRecord

FAR_REST_S = 4.0
HELD_S = 1.0
MOST_S = 0.5
_APART = 0.5  # leans that differ by less are left alone
_TRIED = 4  # receivers for each giver in a turn
_PAUSE_SHARE = 0.1
_USUAL_TOKENS_PER_S = 5000  # of prompts, where a worker does not tell its speed


class FarLeans(Leans):
    """Chooses which decodes move, within nodes and between them."""

    def __init__(self, links: LearnedLinks) -> None:
        super().__init__()
        self._links = links
        self._wishes: dict[str, tuple[str, float]] = {}  # by giver: the receiver, and since when
        self._far_rests_until_s: dict[str, float] = {}

    @override
    def moves(self, workers: Iterable[WorkerRecord], requests: Requests, now: float) -> list[PlannedMove]:
        """Return the next moves; `wished` has the pairs of workers that are to link for later ones."""
        known = list(workers)
        near = super().moves(known, requests, now)
        busy = {one.receiver.registered.pool_name for one in near}  # nodes on which something moves; membership only
        resting = self._far_rests_until_s = {
            name: until_s for name, until_s in self._far_rests_until_s.items() if until_s > now
        }
        able = [
            one
            for one in known
            if one.registered.can_move
            and one.load is not None
            and one.name not in resting
            and one.registered.pool_name not in busy
        ]
        self.wished = wished = self._pairs(able, requests, now)
        self._wishes = {one.giver.name: (one.receiver.name, self._since_s(one, now)) for one in wished}
        far: list[PlannedMove] = []
        for pair in wished:
            if now - self._wishes[pair.giver.name][1] >= HELD_S:
                far += self._that_pay(pair, requests, now)
        for move in far:
            for name in (move.tracked.holder or "", move.receiver.name):
                resting[name] = now + FAR_REST_S
                self._wishes.pop(name, None)
        return near + far

    def _since_s(self, pair: Pair, now: float) -> float:
        receiver, since_s = self._wishes.get(pair.giver.name, ("", now))
        return since_s if receiver == pair.receiver.name else now

    def _pairs(self, able: Collection[WorkerRecord], requests: Requests, now: float) -> list[Pair]:
        takers = {
            one.name: one
            for one in sorted(able, key=lambda one: (one.lean, one.name), reverse=True)
            if one.can_take_over
        }
        found: list[Pair] = []
        for giver in sorted(able, key=lambda one: (one.lean, one.name)):
            promised = takers.get(self._wishes.get(giver.name, ("", now))[0])
            for receiver in islice(chain([promised] if promised is not None else [], takers.values()), _TRIED):
                if receiver.lean - giver.lean < _APART:
                    continue
                if _are_far(giver, receiver) and moves_for_time([giver], [receiver], requests):
                    found.append(Pair(giver, receiver))
                    del takers[receiver.name]
                    break
        return found

    def _that_pay(self, pair: Pair, requests: Requests, now: float) -> list[PlannedMove]:
        block_s = self._links.seconds_per_block(pair.receiver.name, pair.giver.name)
        planned, taken_s = [], 0.0
        for move in moves_for_time([pair.giver], [pair.receiver], requests):
            seconds = block_s * blocks_of(move.tracked, pair.receiver.registered.block_size)
            if taken_s + seconds > MOST_S or not _pays(move.tracked, pair.receiver, seconds, now):
                continue
            planned.append(move)
            taken_s += seconds
            if not block_s:
                break
        return planned


def _are_far(one: WorkerRecord, other: WorkerRecord) -> bool:
    return one.registered.pool_name != other.registered.pool_name


def _pays(tracked: TrackedRequest, receiver: WorkerRecord, seconds: float, now: float) -> bool:
    prompt_tokens_per_s = receiver.load.prompt_tokens_per_s if receiver.load is not None else 0
    if seconds >= tracked.num_prefill_tokens / (prompt_tokens_per_s or _USUAL_TOKENS_PER_S):
        return False
    tpot_s, begun_s = tracked.request.slo.tpot_s, tracked.prefilled_s
    if tpot_s is None:
        return True
    passed_s = now - begun_s if begun_s is not None else 0.0
    return seconds <= _PAUSE_SHARE * (tpot_s * tracked.predicted_output_len - passed_s)

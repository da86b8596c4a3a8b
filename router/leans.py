"""Evens out elastic workers: decodes move from a worker that is short of time or memory to one that has more of it.

A worker measures its lean: 1 less the time that an iteration of its decodes takes, over the gap that they allow. One
at 1 has nothing but prompts to compute, one at 0 has no time for any. A prompt goes to the worker that could begin with
it first (placement.py), and is decoded there, unless the workers of a node drift apart. Then, on each node, one of two:

- Time: the worker with the least lean, if its decodes fill their gaps or prompts wait there, hands its latest requests
  over to the one with the most. The receiver has no prompts, or computes its own in half the time, or the giver's
  decodes take all the time that they may.
  No context moves that would delay all decodes of its receiver, where attention waits for the longest.
- Memory: the worker whose next prompts do not find room in its free blocks hands requests over to the one with most to
  spare: the smallest that frees enough, else the largest.
No ping-pong: after a move for time the receiver has no more decodes than the giver, after one for memory more free
blocks than the giver had; a request is handed over `MAX_MOVES` times at most; and a worker that has given or taken is
left alone for `REST_S`, by when both have told their new loads.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.costmodel.hardware import LearnedLinks
from router.state import TrackedRequest, WorkerRecord

MAX_MOVES = 2
REST_S = 1.0
_APART = 0.25  # leans that differ by less are left alone
_SHORT = 0.125  # a worker with a smaller lean gives even if no prompt waits there: its decodes fill their gaps
_SHARE = 0.25  # of the giver's decodes for each 1.0 of difference, moved at a time
_FASTER = 2.0  # a receiver with prompts of its own computes them in a time so many times shorter
_KEPT_SHARE = 1 / 16  # of a worker's blocks: for decodes that grow
_BLOCKS_APART = 0.25  # of all: so many more are still free at the receiver afterwards, as a move holds them twice
_LEAST_LEN = 32  # tokens of an answer with a mean gap to hold: a shorter one cannot make up for the pause of its move
_FORESEEN_LEN = 512  # tokens of an answer at most: the first of a class are predicted to be as long as they may be
_SOON_S = 2.0  # prompts that a worker computes within this time are to find blocks

Requests = Mapping[RequestId, TrackedRequest]


class WorkerPair(NamedTuple):
    """A worker that is short, and one of another node that has more."""

    giver: WorkerRecord
    receiver: WorkerRecord


class PlannedMove(NamedTuple):
    """A request to be handed over."""

    tracked: TrackedRequest
    receiver: WorkerRecord


class Leans:
    """Chooses which decodes move between the workers of a node, and where to."""

    def __init__(self) -> None:
        self._rests_until_s: dict[str, float] = {}
        self.wished: Sequence[WorkerPair] = ()  # workers of two nodes that are to have a link, as of the last turn

    def moves(self, workers: Iterable[WorkerRecord], requests: Requests, now: float) -> list[PlannedMove]:
        rested: dict[str, list[WorkerRecord]] = {}
        for worker in workers:
            if worker.registered.can_move and self._rests_until_s.get(worker.name, 0.0) <= now:
                rested.setdefault(worker.registered.pool_name, []).append(worker)
        planned = [move for near in rested.values() if len(near) > 1 for move in self.moves_among(near, requests)]
        if planned:
            self._rests_until_s = {name: until_s for name, until_s in self._rests_until_s.items() if until_s > now}
        for tracked, receiver in planned:
            self._rests_until_s[tracked.holder or ""] = self._rests_until_s[receiver.name] = now + REST_S
        return planned

    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        able = [worker for worker in near if worker.can_take_over]
        return moves_for_time(near, able, requests) or moves_for_memory(near, able, requests)


def moves_for_time(
    near: Collection[WorkerRecord], able: Collection[WorkerRecord], requests: Requests
) -> list[PlannedMove]:
    takers = sorted(able, key=lambda worker: (worker.lean, worker.name), reverse=True)
    givers = [worker for worker in near if worker.prefilling or worker.lean < _SHORT]
    for giver in sorted(givers, key=lambda worker: (worker.lean, worker.name)):
        receiver = next((taker for taker in takers if _has_time_for(taker, giver)), None)
        if receiver is None:
            continue
        surplus = len(giver.decoding) - len(receiver.decoding)
        count = min(max(int((receiver.lean - giver.lean) * _SHARE * len(giver.decoding)), 1), surplus // 2)
        latest = [tracked for tracked in _latest(giver, requests) if not receiver.is_delayed_by(_context_len(tracked))]
        chosen = _fitting(latest, _spare(receiver), receiver.registered.block_size)
        planned = [PlannedMove(request, receiver) for request in islice(chosen, max(count, 0))]
        if planned:
            return planned
    return []


def _has_time_for(receiver: WorkerRecord, giver: WorkerRecord) -> bool:
    if receiver.lean - giver.lean < _APART:
        return False
    return not receiver.prefilling or not giver.lean or _FASTER * _prompts_s(receiver) <= _prompts_s(giver)


def _prompts_s(worker: WorkerRecord) -> float:
    return worker.wait_s(is_real_time=False) / max(worker.lean, _SHORT)


def moves_for_memory(
    near: Collection[WorkerRecord], able: Collection[WorkerRecord], requests: Requests
) -> list[PlannedMove]:
    loaded = [worker for worker in near if worker.load is not None]
    receiver = max(
        (worker for worker in able if worker in loaded), key=lambda worker: (_spare(worker), worker.name), default=None
    )
    if receiver is None:
        return []
    short = [worker for worker in loaded if worker.prefilling and _missing(worker) > 0]
    for giver in sorted(short, key=lambda worker: (-_missing(worker), worker.name)):
        planned = [PlannedMove(request, receiver) for request in _to_free(giver, receiver, requests)]
        if planned:
            return planned
    return []


def _to_free(giver: WorkerRecord, receiver: WorkerRecord, requests: Requests) -> Iterator[TrackedRequest]:
    missing, block_size = _missing(giver), receiver.registered.block_size
    apart = int(giver.registered.num_blocks * _BLOCKS_APART)
    spare = min(_spare(receiver), _num_free(receiver) - _num_free(giver) - apart)
    sizes = [(blocks_of(request, block_size), request) for request in _latest(giver, requests)]
    sizes.sort(key=lambda sized: (sized[0] < missing, abs(sized[0] - missing)))
    for tracked in _fitting([request for _, request in sizes], spare, block_size):
        yield tracked
        missing -= blocks_of(tracked, block_size)
        if missing <= 0:
            return


def _fitting(requests: Iterable[TrackedRequest], spare: int, block_size: int) -> Iterator[TrackedRequest]:
    for tracked in requests:
        num_blocks = blocks_of(tracked, block_size)
        if num_blocks <= spare:
            spare -= num_blocks
            yield tracked


def _missing(worker: WorkerRecord) -> int:
    rate = worker.load.prompt_tokens_per_s if worker.load is not None else 0
    soon = min(worker.num_prefill_tokens, int(rate * _SOON_S))
    return _kept(worker) + blocks_for(soon, worker.registered.block_size) - _num_free(worker)


def _spare(worker: WorkerRecord) -> int:
    return _num_free(worker) - _kept(worker) - blocks_for(worker.num_prefill_tokens, worker.registered.block_size)


def _kept(worker: WorkerRecord) -> int:
    return int(worker.registered.num_blocks * _KEPT_SHARE)


def _num_free(worker: WorkerRecord) -> int:
    return worker.load.num_free_blocks if worker.load is not None else worker.registered.num_blocks


def blocks_of(tracked: TrackedRequest, block_size: int) -> int:
    return blocks_for(_context_len(tracked), block_size)


def _context_len(tracked: TrackedRequest) -> int:
    return tracked.request.prompt_len + min(int(tracked.predicted_output_len), _FORESEEN_LEN)


def _latest(giver: WorkerRecord, requests: Requests) -> list[TrackedRequest]:
    movable = [tracked for tracked in map(requests.__getitem__, giver.decoding) if _is_movable(tracked)]
    return sorted(movable, key=lambda tracked: (-tracked.request.arrival_s, tracked.request.request_id))


def _is_movable(tracked: TrackedRequest) -> bool:
    if tracked.request.slo.tpot_s is not None and tracked.predicted_output_len < _LEAST_LEN:
        return False
    return tracked.stage is Stage.DECODING and tracked.destination is None and tracked.num_moves < MAX_MOVES


FAR_REST_S = 4.0
HELD_S = 1.0
MOST_S = 0.5
_FAR_APART = 0.5  # leans that differ by less are left alone
_TRIED = 4  # receivers for each giver in a turn
_PAUSE_SHARE = 0.1
_USUAL_TOKENS_PER_S = 5000  # of prompts, where a worker does not tell its speed


class FarLeans(Leans):
    """Chooses which decodes move, within nodes and between them: what Leans decides, with more caution over a network.

    - - Two workers' leans differ by `_FAR_APART` or more, half of their time; nothing moves on their own nodes at that
      moment. Memory alone is no reason.
    - - The wish for a move holds for `HELD_S` before anything moves. Meanwhile the two link. A giver keeps to its
      promised receiver for as long as that one has more time by as much.
    - - Both rest for `FAR_REST_S` afterwards.
    - - What a move takes is forecast from what the link took for a block so far: less than computing the request again
      takes the receiver, and at most a tenth of the time that is left of an answer with a gap to hold. All that moves
      at once takes at most `MOST_S`. Over an unknown link one request moves, and shows its speed.

    Example: a block takes 1 ms from a to b, and a request has 90 of them: 90 ms. Its prompt of 1 400 tokens takes b 280
    ms at 5 000 a second, and it has 300 tokens left with gaps of 50 ms: it moves, and with it as many as take 500 ms in
    all.
    """

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
        busy = {move.receiver.registered.pool_name for move in near}  # nodes on which something moves; membership only
        resting = self._far_rests_until_s = {
            name: until_s for name, until_s in self._far_rests_until_s.items() if until_s > now
        }
        able = [
            worker
            for worker in known
            if worker.registered.can_move
            and worker.load is not None
            and worker.name not in resting
            and worker.registered.pool_name not in busy
        ]
        self.wished = wished = self._pairs(able, requests, now)
        self._wishes = {pair.giver.name: (pair.receiver.name, self._since_s(pair, now)) for pair in wished}
        far: list[PlannedMove] = []
        for pair in wished:
            if now - self._wishes[pair.giver.name][1] >= HELD_S:
                far += self._paying(pair, requests, now)
        for move in far:
            for name in (move.tracked.holder or "", move.receiver.name):
                resting[name] = now + FAR_REST_S
                self._wishes.pop(name, None)
        return near + far

    def _since_s(self, pair: WorkerPair, now: float) -> float:
        receiver, since_s = self._wishes.get(pair.giver.name, ("", now))
        return since_s if receiver == pair.receiver.name else now

    def _pairs(self, able: Collection[WorkerRecord], requests: Requests, now: float) -> list[WorkerPair]:
        takers = {
            worker.name: worker
            for worker in sorted(able, key=lambda worker: (worker.lean, worker.name), reverse=True)
            if worker.can_take_over
        }
        pairs: list[WorkerPair] = []
        for giver in sorted(able, key=lambda worker: (worker.lean, worker.name)):
            promised = takers.get(self._wishes.get(giver.name, ("", now))[0])
            for receiver in islice(chain([promised] if promised is not None else [], takers.values()), _TRIED):
                if receiver.lean - giver.lean < _FAR_APART:
                    continue
                if (giver.registered.pool_name != receiver.registered.pool_name) and moves_for_time(
                    [giver], [receiver], requests
                ):
                    pairs.append(WorkerPair(giver, receiver))
                    del takers[receiver.name]
                    break
        return pairs

    def _paying(self, pair: WorkerPair, requests: Requests, now: float) -> list[PlannedMove]:
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


def _pays(tracked: TrackedRequest, receiver: WorkerRecord, seconds: float, now: float) -> bool:
    prompt_tokens_per_s = receiver.load.prompt_tokens_per_s if receiver.load is not None else 0
    if seconds >= tracked.num_prefill_tokens / (prompt_tokens_per_s or _USUAL_TOKENS_PER_S):
        return False
    tpot_s, begun_s = tracked.request.slo.tpot_s, tracked.prefilled_s
    if tpot_s is None:
        return True
    passed_s = now - begun_s if begun_s is not None else 0.0
    return seconds <= _PAUSE_SHARE * (tpot_s * tracked.predicted_output_len - passed_s)

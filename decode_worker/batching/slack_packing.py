"""Slack packed: requests of any length join what runs, as long as every gap stays within its objective.

A batch of similar lengths leaves time unused where attention costs the sum of the contexts: requests of other lengths
could join it, and no gap would miss its objective. So where mixing lengths costs nothing, by the cost model, waiting
requests are packed into that slack (Kairos, arXiv 2605.02329), the shortest contexts first, as most of those fit. Of
two objectives the tighter counts, and time that a request is ahead of its own schedule:

    iteration with the candidate <= min over running requests with a TPOT of  until * tpot + ahead / min(left, own left)
    until                         = (1 + share) / 2
    ahead                         = max(first token + (tokens - 1) * tpot - now, 0)

`left` are the tokens that both will run together: a short answer may prolong iterations by more, as it is gone sooner.
A candidate that has waited for PATIENCE_S is passed by no other. Without objectives, of late as well, memory alone
bounds what joins.

So that few wait here, after their first token, the router is told of less: the room within the share itself.

Example: decodes with gaps of 40 ms run, an iteration takes 34 ms, each candidate adds 1.5 ms, the share is 0.8: one
enters (35.5 ms). If all that run are 160 ms ahead, with 100 tokens left, one with 40 more tokens may prolong the
iteration to 36 + 160 / 40 = 40 ms: four enter.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

from alignedserve.core.class_floor import TurnClass
from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import CostModel, LearningCostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.workers import ANY_LENGTH
from alignedserve.scheduling.table_operations import is_cheap_beside
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.request import WorkerRequest
from decode_worker.state import RunningRequest

PATIENCE_S = 1.0  # then a candidate goes before later ones of any length
_MEMORY_S = 30.0  # for which an objective bounds entries after its last request

_SPREAD, _FREE = 8, 0.1  # a context of so many times the mean is to prolong an iteration by at most this share
_LEAST_AHEAD, _AHEAD = 2, 1 / 16  # candidates that wait here: at least, and of what runs
ROOM_STEP = 128  # tokens
_GROWTH = 8  # tokens by which each grows while a prompt is computed and copied
_PROBED, _LEAST_TOKEN_S = 4096, 1e-10


class SlackPack(NamedTuple):
    """How a worker packs: the share of an objective that an iteration may take, and what iterations cost."""

    share: float
    costs: CostModel
    learner: LearningCostModel | None = None  # `costs` again, where it is one that learns


class _Held(NamedTuple):
    allowed_s: float  # of an iteration, however many tokens it has left
    ahead_s: float
    num_left: float


class SlackPacking:
    """The bound of one worker, and the order of its candidates. Reads running requests, and learns what they cost."""

    def __init__(self, running: Mapping[RequestId, RunningRequest], packing: SlackPack) -> None:
        self._running = running
        self._share, self._costs, self._learner = packing
        self._until = (1.0 + self._share) / 2  # of an objective, with what waits here already
        self._begun: IterationWork | None = None
        self._tightest_s, self._seen_s = inf, -inf  # the tightest objective of late, and when it was last here
        least = IterationWork()
        least.add_decode(0)
        self._least = least

    # --- who may enter

    def within(
        self,
        candidates: Iterable[Candidate],
        loading: Iterable[Candidate],
        now: float,
        *,
        by_floor: RequestId | None = None,
    ) -> Iterator[Candidate]:
        work, least_s = self._work(), self._costs.iteration_s(self._least)
        bounds = (self._held(running, now, least_s) for running in self._running.values())
        held = [bound for bound in bounds if bound is not None]
        if not held:  # what enters stays for a while, and those with an objective may be back by then
            held.append(_Held(self._until * self._tightest_s, 0.0, 1.0))
        for candidate in loading:
            note_candidate(work, candidate)
            held += self._held_of_new(candidate, least_s)
        for candidate in sorted(candidates, key=lambda entry: self._turn(entry, now, least_s, by_floor)):
            if work.num_decodes and self._with(work, candidate) > _allowed_s(held, _num_left(candidate)):
                return
            note_candidate(work, candidate)
            held += self._held_of_new(candidate, least_s)
            yield candidate

    def _with(self, work: IterationWork, candidate: Candidate) -> float:
        trial = work.copy()
        note_candidate(trial, candidate)
        return self._costs.iteration_s(trial)

    def _held(self, running: RunningRequest, now: float, least_s: float) -> _Held | None:
        tpot_s = _tpot_of(running)
        if tpot_s is None or self._share * tpot_s < least_s:
            return None
        ahead_s = running.first_token_s + (len(running.generated_token_ids) - 1) * tpot_s - now
        return _Held(self._until * tpot_s, max(ahead_s, 0.0), _num_left(running))

    def _held_of_new(self, candidate: Candidate, least_s: float) -> list[_Held]:
        tpot_s = _tpot_of(candidate)
        if tpot_s is None or self._share * tpot_s < least_s:
            return []
        return [_Held(self._until * tpot_s, 0.0, 1.0)]

    def _turn(
        self, candidate: Candidate, now: float, least_s: float, by_floor: RequestId | None
    ) -> tuple[bool, TurnClass, bool, float, RequestId]:
        request_id, waits = candidate.request.request_id, now - candidate.granted_s >= PATIENCE_S
        granted_s = candidate.granted_s if waits else float(candidate.context_len)
        return request_id != by_floor, _class_of(candidate, now, least_s), not waits, granted_s, request_id

    # --- what may join, and what waits

    def is_mixing_cheaper(self, context_lens: Collection[int]) -> bool:
        return self.mixes_freely() or is_cheap_beside(self._work(), self._costs, context_lens)

    def mixes_freely(self) -> bool:
        """Return whether any length may join: one context of many times the mean would prolong the iteration little."""
        work = self._work()
        if not work.num_decodes:
            return True
        mean = -(-work.decode_context_len // work.num_decodes)
        even = replace(work, max_decode_context_len=mean)
        uneven = replace(work, max_decode_context_len=_SPREAD * mean)
        return self._costs.iteration_s(uneven) <= (1.0 + _FREE) * self._costs.iteration_s(even)

    def room(self, loading: Iterable[Candidate]) -> int:
        work, least_s = self._work(), self._costs.iteration_s(self._least)
        bounds = [self._bound_s(running, least_s) for running in self._running.values()]
        for candidate in loading:
            note_candidate(work, candidate)
            bounds.append(self._bound_s(candidate, least_s))
        allowed_s = min(bounds, default=inf)
        if allowed_s == inf:
            allowed_s = self._share * self._tightest_s
        if allowed_s == inf:
            return ANY_LENGTH
        shortest, longer = work.copy(), work.copy()
        shortest.add_decode(0)
        longer.add_decode(_PROBED)
        shortest_s = self._costs.iteration_s(shortest)
        token_s = max((self._costs.iteration_s(longer) - shortest_s) / _PROBED, _LEAST_TOKEN_S)
        num_tokens = int((allowed_s - shortest_s) / token_s) - _GROWTH * len(self._running)
        return min(max(num_tokens, 0) // ROOM_STEP * ROOM_STEP, ANY_LENGTH)

    def _bound_s(self, request: WorkerRequest, least_s: float) -> float:
        tpot_s = _tpot_of(request)
        return inf if tpot_s is None or self._share * tpot_s < least_s else self._share * tpot_s

    def wants_more(self, num_waiting: int) -> bool:
        return num_waiting < max(_LEAST_AHEAD, _AHEAD * len(self._running))

    def began(self, now: float) -> None:
        self._begun = self._work() if self._learner is not None else None
        least_s = self._costs.iteration_s(self._least)
        tightest_s = (
            min((self._bound_s(running, least_s) for running in self._running.values()), default=inf) / self._share
        )
        if tightest_s <= self._tightest_s or now - self._seen_s > _MEMORY_S:
            self._tightest_s, self._seen_s = tightest_s, now

    def completed(self, duration_s: float, grammar_s: float | None) -> None:
        begun, self._begun = self._begun, None
        if self._learner is not None and begun is not None and duration_s > 0.0 and not begun.is_empty:
            self._learner.observe(begun, duration_s, grammar_s)

    def _work(self) -> IterationWork:
        work, lens, num_constrained = IterationWork(), [], 0
        for running in self._running.values():
            if running.is_stalled:
                continue
            is_constrained = bool(running.request.sampling.grammar)
            if running.num_remaining > 1:
                work.add_chunk(running.num_remaining, running.num_computed, is_last=True, is_constrained=is_constrained)
                continue
            lens.append(running.context_len)
            num_constrained += is_constrained
        work.add_decodes(len(lens), sum(lens), max(lens, default=0), num_constrained=num_constrained)
        return work


def note_candidate(work: IterationWork, candidate: Candidate) -> None:
    work.add_decode(candidate.context_len, is_constrained=bool(candidate.request.sampling.grammar))


def _allowed_s(held: Iterable[_Held], num_left: float) -> float:
    return min((bound.allowed_s + bound.ahead_s / min(bound.num_left, num_left) for bound in held), default=inf)


def _tpot_of(request: WorkerRequest) -> float | None:
    return request.request.slo.tpot_s if request.is_real_time else None


def _num_left(request: WorkerRequest) -> float:
    expected, num_generated = (
        request.predicted_output_len or request.request.sampling.max_tokens,
        len(request.generated_token_ids),
    )
    return max(expected - num_generated if expected > num_generated else num_generated, 1.0)


def _class_of(candidate: Candidate, now: float, least_s: float) -> TurnClass:
    if not candidate.is_real_time:
        return TurnClass.BEST_EFFORT
    tpot_s = candidate.request.slo.tpot_s
    if tpot_s is None:
        return TurnClass.ON_TIME
    num_left = _num_left(candidate)
    due_s = candidate.first_token_s + (len(candidate.generated_token_ids) + num_left - 1) * tpot_s
    # One that is late waits no longer than PATIENCE_S for those on time, or they would keep it from ever entering.
    is_overdue = now - candidate.granted_s >= PATIENCE_S
    return TurnClass.ON_TIME if is_overdue or due_s - now >= num_left * least_s else TurnClass.LATE

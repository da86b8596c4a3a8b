"""Chooses the next prompt and the worker that computes it.

The least loaded worker that may have another prompt gets the first of the queue; where loads are about equal, one of
the node of the request's gateway. A worker whose pool has no room for what it has computed comes after all others.

A worker that has the beginning of the prompt cached gets it instead if that is worth more than its load costs. Both are
counted in tokens at its speed: what it has to compute before the prompt, what is left of the prompt to compute, and for
each request that it holds one for every token that the new one will generate, as each of them makes an iteration longer
by about the time of one prompt token. What is left of the prompt counts three times, or four where only a deadline
counts: it is work that others wait for, and what a busy worker computes a second time makes all that it is given later
wait. So a prompt waits for one like it that is being computed, up to three times as long as to compute it beside that
one would take.
Example: both workers compute 5 000 tokens/s and have nothing to compute. a holds 4 requests, b 10, with 1 000 of a chat
prompt's 1 060 tokens cached. With an answer of 32 tokens it costs a 3 * 1 060 + 4 * 32 = 3 308 tokens, b 3 * 60 + 10 *
32 = 500: it goes to b. With an answer of 1 000 it costs 7 180 and 10 180: to a.

A worker that has the adapter of a request gets it likewise: one that does not costs 0.2 s more, for which it would load
the adapter and evict another. So each adapter stays with few workers, and one in demand comes to be on many.
Example: a has 1 500 tokens to compute and the adapter, b nothing to compute. At 5 000 tokens/s a prompt waits 0.3 s at
a and costs 0.2 s more at b: it goes to b, which has the adapter from then on. With 500 tokens at a: to a.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from router.placement import Placement
from router.prediction.late_predictions import expected_len
from router.prefill_queue import Turn
from router.prefills.look_ahead import is_decoded_soon, wants_more
from router.prefills.promised_room import PromisedRoom
from router.request_registry import RequestRegistry
from router.state import NO_HIT, PrefixHit, TrackedRequest, WorkerRecord
from router.workers.adapter_index import LOAD_S
from router.workers.prefix_index import hit_of

_WORK_OF_REAL_TIME = 3.0
_WORK_OF_BEST_EFFORT = 4.0
_MOST_HELD_S = 5.0  # a prompt is held back for a decode worker with room


class ChosenPrefill(NamedTuple):
    """A request that leaves the queue, its worker, and what that one has of it."""

    tracked: TrackedRequest
    worker: WorkerRecord
    hit: PrefixHit


class _Seeker(NamedTuple):
    tracked: TrackedRequest
    beside: RequestClass | None  # whose prompts at a worker leave less room for it; None: all of them
    is_bounded: bool  # to workers that have less than tenants may have there who share its class
    now: float


class PrefillChoice:
    """Takes requests out of the queue, one at a time."""

    def __init__(self, *, registry: RequestRegistry, placement: Placement, max_tokens_per_worker: int) -> None:
        self._registry = registry
        self._placement = placement
        self._max_tokens_per_worker = max_tokens_per_worker
        self._packs = placement.packs
        self._promised = PromisedRoom(registry.requests, placement.workers)
        self._held: tuple[RequestId, float] | None = None  # the last prompt held back until it is decoded soon

    def next(self, gateways: Mapping[str, str], now: float) -> ChosenPrefill | None:
        """Take the next request out of the queue, and return it with its worker; None: no worker can have one now.

        `gateways`: with their nodes.
        """
        for turn in self._registry.queue.turns(now):
            seeker = self._seeker(turn, now)
            chosen = self._place(seeker, gateways)
            if chosen is not None:
                self._registry.take(chosen.tracked, chosen.tracked.num_prefill_tokens - chosen.hit.num_tokens)
                if self._packs and _begins_gaps(chosen.tracked):
                    self._promised.add(chosen.tracked)
                return chosen
        return None

    def _seeker(self, turn: Turn, now: float) -> _Seeker:
        tracked = self._registry.requests[turn.request_id]
        is_bounded = self._registry.queue.is_bounded(turn.request_id, now)
        return _Seeker(tracked, self._counted_beside(tracked, turn), is_bounded, now)

    def _place(self, seeker: _Seeker, gateways: Mapping[str, str]) -> ChosenPrefill | None:
        tracked = seeker.tracked
        runs = self._placement.prefix_runs(tracked)
        for worker in self._candidates(tracked, runs):
            hit = hit_of(tracked, worker, runs) if runs else NO_HIT
            if self._has_room(worker, hit, seeker):
                return self._near_gateway(ChosenPrefill(tracked, worker, hit), gateways, runs, seeker)
        return None

    def _counted_beside(self, tracked: TrackedRequest, turn: Turn) -> RequestClass | None:
        """Return the class whose prompts at a worker leave less room for this one; None: all of them.

        Real-time prompts pass best-effort ones there; and a best-effort one that the floor lets go would never find a
        place between them.
        """
        is_apart = turn.is_by_floor or self._passes_documents(tracked)
        return tracked.request.request_class if is_apart else None

    def _passes_documents(self, tracked: TrackedRequest) -> bool:
        return tracked.is_real_time and self._registry.queue.order.knows_classes

    def _candidates(self, tracked: TrackedRequest, runs: Mapping[str, int]) -> Iterator[WorkerRecord]:
        passes_documents = self._passes_documents(tracked)
        least = self._placement.least_loaded_prefiller(is_real_time=passes_documents)
        if least is not None:
            if runs or tracked.adapter:
                yield self._cheapest(tracked, least, runs)
            yield least
        last = self._placement.least_loaded_prefiller(is_real_time=passes_documents, at_full_pool=True)
        if last is not None:
            yield last

    def _cheapest(self, tracked: TrackedRequest, least: WorkerRecord, runs: Mapping[str, int]) -> WorkerRecord:
        holders = list(self._placement.prefix_holders(runs, runs.get(least.name, 0)))
        if self._lacks_adapter(tracked, least):
            holders += map(self._placement.workers.__getitem__, self._placement.adapters.holders(tracked.adapter))
        able = [worker for worker in holders if self._placement.can_prefill_now(worker)]
        if not able:
            return least
        return min((least, *able), key=lambda one: (self._cost_s(tracked, one, runs), one is not least, one.name))

    def _cost_s(self, tracked: TrackedRequest, worker: WorkerRecord, runs: Mapping[str, int]) -> float:
        weight = _WORK_OF_REAL_TIME if tracked.is_real_time else _WORK_OF_BEST_EFFORT
        num_tokens = weight * (tracked.num_prefill_tokens - hit_of(tracked, worker, runs).num_tokens)
        if worker.registered.can_decode:
            num_left = expected_len(tracked) - tracked.num_emitted
            num_tokens += (len(worker.prefilling) + len(worker.decoding)) * num_left
        wait_s = worker.wait_s(is_real_time=self._passes_documents(tracked))
        if self._lacks_adapter(tracked, worker):
            wait_s += worker.seconds_as_wait(LOAD_S)
        return wait_s + num_tokens / worker.prompt_tokens_per_s

    def _lacks_adapter(self, tracked: TrackedRequest, worker: WorkerRecord) -> bool:
        return bool(tracked.adapter) and not self._placement.adapters.has(worker.name, tracked.adapter)

    def _has_room(self, worker: WorkerRecord, hit: PrefixHit, seeker: _Seeker) -> bool:
        tracked = seeker.tracked
        if seeker.is_bounded and not self._wants_more(tracked, worker):
            return False
        if self._packs and _begins_gaps(tracked) and not self._may_begin_gaps(tracked, worker, seeker.now):
            return False
        leaves_room = self._registry.queue.order.knows_classes and not tracked.is_real_time
        num_tokens = tracked.num_prefill_tokens - hit.num_tokens
        return worker.has_room(
            num_tokens,
            self._max_tokens_per_worker,
            beside=seeker.beside,
            leaves_room=leaves_room,
            passes_late=tracked.first_due_s > seeker.now,
        )

    def _wants_more(self, tracked: TrackedRequest, worker: WorkerRecord) -> bool:
        beside = self._placement.beside(worker)
        return wants_more(worker, self._placement.pool_of(worker.name), beside, is_real_time=tracked.is_real_time)

    def _may_begin_gaps(self, tracked: TrackedRequest, worker: WorkerRecord, now: float) -> bool:
        pool, beside = self._placement.pool_of(worker.name), self._placement.beside(worker)
        self._promised.count()
        if is_decoded_soon(tracked.num_prefill_tokens, pool, beside):
            return True
        if self._held is None or self._held[0] != tracked.request.request_id:
            self._held = (tracked.request.request_id, now)
        return now - self._held[1] >= _MOST_HELD_S

    def _near_gateway(
        self,
        chosen: ChosenPrefill,
        gateways: Mapping[str, str],
        runs: Mapping[str, int],
        seeker: _Seeker,
    ) -> ChosenPrefill:
        tracked = chosen.tracked
        near = self._placement.near_prefiller(
            gateways.get(tracked.gateway, ""), chosen.worker, is_real_time=self._passes_documents(tracked)
        )
        if near is None or near is chosen.worker:
            return chosen
        if self._lacks_adapter(tracked, near) and not self._lacks_adapter(tracked, chosen.worker):
            return chosen
        hit = hit_of(tracked, near, runs) if runs else NO_HIT
        has_room = self._has_room(near, hit, seeker)
        if hit.num_tokens < chosen.hit.num_tokens or not has_room:
            return chosen
        return ChosenPrefill(tracked, near, hit)


def _begins_gaps(tracked: TrackedRequest) -> bool:
    return tracked.is_real_time and tracked.request.slo.tpot_s is not None and not tracked.num_emitted

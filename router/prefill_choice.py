"""Chooses the next prompt and the worker that computes it.

The least loaded worker that may have another prompt gets the first of the queue; where loads are about equal, a
worker of the node of the request's gateway. Workers whose pool is full come after all others.

A worker that has the beginning of the prompt cached gets it instead if the hit is worth more than the worker's load
costs. Both are counted in tokens at its speed: what it has to compute before the prompt, what is left of the prompt
to compute, and for each request that it holds one for every token that the new one will generate, as each makes an
iteration longer by about the time of one prompt token. The rest of the prompt counts three times, or four where
only a deadline counts: others wait for it, and tokens computed twice on a busy worker delay every later prompt. So
a prompt waits for a similar one under way, up to three times as long as computing it beside would take.
Example: both workers compute 5 000 tokens/s and have nothing to compute. a holds 4 requests, b 10, with 1 000 of a
chat prompt's 1 060 tokens cached. With an answer of 32 tokens it costs a 3 * 1 060 + 4 * 32 = 3 308 tokens, b 3 *
60 + 10 * 32 = 500: it goes to b. With an answer of 1 000 it costs 7 180 and 10 180: to a.

The adapter of a request counts likewise: a worker without it costs 0.2 s more, for loading the adapter and evicting
another. So each adapter stays with few workers, and an adapter in demand spreads to many.
Example: a has 1 500 tokens to compute and the adapter, b nothing to compute. At 5 000 tokens/s a prompt waits 0.3 s
at a and costs 0.2 s more at b: it goes to b, which has the adapter from then on. With 500 tokens at a: to a.

Where attention waits for the longest context (AlignedServe, section 2), all able workers are compared, also by what the
new decodes take there and by how much they delay the others (WorkerRecord.decodes_s). Long contexts gather at the
worker that has most of them, their home, and short ones leave it; a prompt waits a second longer for that at most, and
half of the time before its first token is late.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass
from alignedserve.messages.workers import WorkerLoad
from router.placement import Placement
from router.prefill_queue import QueueTurn
from router.prefix_index import LOAD_S, hit_of
from router.request_registry import RequestRegistry, expected_len
from router.state import NO_HIT, PoolRecord, PrefixHit, TrackedRequest, WorkerRecord

_PROMPTS_S = 0.1
_FALLBACK_TOKENS = 512.0  # where a worker does not tell its speed
_MEASURED_TOKENS = 64  # of the prompt whose time a separate prefill worker tells
_MORE_PLACES = 1 / 16
_POOLED_SHARE = 1 / 4
_LEAST_POOLED = 4


def wants_more(
    worker: WorkerRecord, pool: PoolRecord | None, beside: Collection[WorkerRecord], *, is_real_time: bool
) -> bool:
    """Return whether a worker has less of a class than may wait there while tenants share it. `beside`: its node's
    workers.

    The rest stays in the router's queue, whose order is fair; workers and pools know no tenants. A worker has
    prompts of the class for 0.1 s, and one in any case; a worker of both phases has as many requests as it decodes
    in one iteration and a sixteenth more. For a prefill worker requests count on their way to the pool and there: a
    quarter of the places to decode beside it.
    Example: a worker computes 5 000 prompt tokens/s and decodes 32 requests together: at most 500 tokens of
    prompts, and 34 requests; for best effort, real-time ones count among the 34.
    """
    num_real_time_tokens = (
        worker.num_real_time_tokens if is_real_time else worker.num_prefill_tokens - worker.num_real_time_tokens
    )
    if num_real_time_tokens >= _allowed_tokens(worker) and num_real_time_tokens:
        return False
    if worker.registered.can_decode:
        return _has_places(worker, is_real_time=is_real_time)
    places = on_the_way = 0
    for other in beside:
        places += other.num_places
        on_the_way += other.num_prompts(is_real_time=is_real_time)
    pooled = 0
    if pool is not None:
        pooled = len(pool.pooled_real_time) if is_real_time else pool.num_pooled - len(pool.pooled_real_time)
    return on_the_way + pooled < max(_POOLED_SHARE * places, _LEAST_POOLED)


def is_decoded_soon(num_tokens: int, pool: PoolRecord | None, beside: Collection[WorkerRecord]) -> bool:
    """Return whether a prompt of so many tokens, computed now, would find room to decode. `beside`: workers of the
    node.

    Where slack is packed (BatchingConfig.pack_share), a request with a TPOT objective waits for room before its first
    token, as after it every second counts as a gap: until a decode worker of the node has room beside all that is
    promised, while fewer requests wait with their first token than there are workers. Waiting best effort does not
    count: it goes after them. Where a worker keeps lengths apart, the pool needs many to choose from.
    """
    rooms: list[int] = []
    waiting = len(pool.pooled_real_time) if pool is not None else 0
    for worker in beside:
        if worker.num_places and not worker.is_draining:
            if not worker.takes_any_length:
                return True
            rooms.append(worker.room)
            waiting += worker.load.num_real_time_candidates if worker.load is not None else 0
    if not rooms:
        return True
    return waiting < len(rooms) and num_tokens <= max(rooms)


def _allowed_tokens(worker: WorkerRecord) -> float:
    speed, short_prompt_s = worker.prompt_tokens_per_s, worker.registered.speed.short_prompt_s
    if speed > 1:
        return _PROMPTS_S * speed
    return _PROMPTS_S * _MEASURED_TOKENS / short_prompt_s if short_prompt_s else _FALLBACK_TOKENS


def _has_places(worker: WorkerRecord, *, is_real_time: bool) -> bool:
    if is_real_time:
        num_held = worker.num_real_time_prompts + len(worker.decoding_real_time)
    else:
        num_held = worker.num_held
    places = worker.num_places
    return num_held < places + max(1, int(_MORE_PLACES * places))


_MORE_TOKENS = 96  # for growth until the next load, and for the time that it adds to iterations


@dataclass(slots=True)
class _Promise:
    num_tokens: int
    load: WorkerLoad | None = None  # of its worker, as told before the request arrived
    has_arrived: bool = False


class PromisedRoom:
    """Room at decode workers that is promised to prompts, from their dispatch until the worker's next load with the
    request."""

    def __init__(self, requests: Mapping[RequestId, TrackedRequest], workers: Mapping[str, WorkerRecord]) -> None:
        self._requests = requests
        self._workers = workers
        self._promises: dict[RequestId, _Promise] = {}
        self._promised: dict[str, None] = {}  # workers whose room is

    def add(self, tracked: TrackedRequest) -> None:
        self._promises[tracked.request.request_id] = _Promise(tracked.num_prefill_tokens + _MORE_TOKENS)

    def count(self) -> None:
        for name in self._promised:
            if (worker := self._workers.get(name)) is not None:
                worker.num_promised = 0
        self._promised = {}
        for request_id, promise in list(self._promises.items()):
            tracked = self._requests.get(request_id)
            if tracked is None or self._is_settled(tracked, promise):
                del self._promises[request_id]
                continue
            having = tracked.destination if tracked.stage is Stage.PREFILLING else tracked.holder
            if (worker := self._workers.get(having or "")) is not None:
                of_states = worker.registered.state_blocks * worker.registered.block_size
                worker.num_promised += promise.num_tokens + of_states
                self._promised[worker.name] = None

    def _is_settled(self, tracked: TrackedRequest, promise: _Promise) -> bool:
        if tracked.stage not in (Stage.PREFILLING, Stage.DECODING):
            return True
        worker = self._workers.get(tracked.holder or "")
        if tracked.stage is Stage.PREFILLING or worker is None:
            return worker is None
        if not promise.has_arrived:
            promise.has_arrived, promise.load = True, worker.load
            return False
        return worker.load is not promise.load


_WORK_OF_REAL_TIME = 3.0
_WORK_OF_BEST_EFFORT = 4.0
_MOST_LATER_S = 1.0  # a prompt waits longer to be among contexts of its length
_SPARE_SHARE = 0.5  # or so much of the time before its first token is late
_MOST_HELD_S = 5.0  # a prompt is held back for a decode worker with room


class ChosenPrefill(NamedTuple):
    """A request that leaves the queue, its worker, and the worker's cached part of it."""

    tracked: TrackedRequest
    worker: WorkerRecord
    hit: PrefixHit


class _Seeker(NamedTuple):
    tracked: TrackedRequest
    beside: RequestClass | None  # whose prompts leave less room for it; None: all
    is_bounded: bool  # to workers with less of its class than sharing tenants may have there
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
        """Take the next request out of the queue; None: no worker can have one now. `gateways`: with their nodes."""
        for turn in self._registry.queue.turns(now):
            tracked = self._registry.requests[turn.request_id]
            is_bounded = self._registry.queue.is_bounded(turn.request_id, now)
            seeker = _Seeker(tracked, self._counted_beside(tracked, turn), is_bounded, now)
            chosen = self._place(seeker, gateways)
            if chosen is not None:
                num_tokens = chosen.tracked.num_prefill_tokens - chosen.hit.num_tokens
                self._registry.take(chosen.tracked, num_tokens, now)
                if self._packs and _begins_gaps(chosen.tracked):
                    self._promised.add(chosen.tracked)
                return chosen
        return None

    def _place(self, seeker: _Seeker, gateways: Mapping[str, str]) -> ChosenPrefill | None:
        tracked = seeker.tracked
        runs = self._placement.prefix_runs(tracked)
        for worker in self._candidates(seeker, runs):
            hit = hit_of(tracked, worker, runs) if runs else NO_HIT
            if self._has_room(worker, hit, seeker):
                return self._near_gateway(ChosenPrefill(tracked, worker, hit), gateways, runs, seeker)
        return None

    def _counted_beside(self, tracked: TrackedRequest, turn: QueueTurn) -> RequestClass | None:
        """Return the class of prompts that leave less room for the prompt; None: all classes.

        Real-time prompts pass best effort. A best-effort prompt that the floor lets go would never find a place
        among them.
        """
        is_apart = turn.is_by_floor or self._passes_documents(tracked)
        return tracked.request.request_class if is_apart else None

    def _passes_documents(self, tracked: TrackedRequest) -> bool:
        return tracked.is_real_time and self._registry.queue.order.knows_classes

    def _candidates(self, seeker: _Seeker, runs: Mapping[str, int]) -> Iterator[WorkerRecord]:
        tracked = seeker.tracked
        passes_documents = self._passes_documents(tracked)
        least = self._placement.least_loaded_prefiller(is_real_time=passes_documents)
        if least is not None:
            if runs or tracked.adapter or least.delay.longer_token_s:
                yield self._cheapest(seeker, least, runs)
            yield least
        last = self._placement.least_loaded_prefiller(is_real_time=passes_documents, at_full_pool=True)
        if last is not None:
            yield last

    def _cheapest(self, seeker: _Seeker, least: WorkerRecord, runs: Mapping[str, int]) -> WorkerRecord:
        tracked = seeker.tracked
        holders = list(self._placement.prefix_holders(runs, runs.get(least.name, 0)))
        if self._lacks_adapter(tracked, least):
            holders += map(self._placement.workers.__getitem__, self._placement.adapters.holders(tracked.adapter))
        gathers = least.delay.longer_token_s > 0.0
        if gathers:
            holders += [worker for worker in self._placement.workers.values() if self._is_soon(seeker, worker, least)]
        able = [worker for worker in holders if self._placement.can_prefill_now(worker)]
        if not able:
            return least
        home = max((least, *able), key=lambda worker: (worker.num_longer, worker.name)) if gathers else None

        def rank(worker: WorkerRecord) -> tuple[float, bool, str]:
            return self._cost_s(tracked, worker, runs, is_home=worker is home), worker is not least, worker.name

        return min((least, *able), key=rank)

    def _cost_s(
        self, tracked: TrackedRequest, worker: WorkerRecord, runs: Mapping[str, int], *, is_home: bool
    ) -> float:
        wait_s = worker.wait_s(is_real_time=self._passes_documents(tracked))
        weight = _WORK_OF_REAL_TIME if tracked.is_real_time else _WORK_OF_BEST_EFFORT
        num_tokens = weight * (tracked.num_prefill_tokens - hit_of(tracked, worker, runs).num_tokens)
        if worker.registered.can_decode:
            num_left = expected_len(tracked) - tracked.num_emitted
            num_tokens += worker.num_held * num_left
            wait_s += worker.decodes_s(tracked.num_prefill_tokens, num_left, is_home=is_home)
        if self._lacks_adapter(tracked, worker):
            wait_s += worker.seconds_as_wait(LOAD_S)
        return wait_s + num_tokens / worker.prompt_tokens_per_s

    def _is_soon(self, seeker: _Seeker, worker: WorkerRecord, least: WorkerRecord) -> bool:
        """Return whether a worker of short or of long contexts may be chosen for them, though others are as free."""
        tracked = seeker.tracked
        passes, needed = self._passes_documents(tracked), tracked.num_prefill_tokens
        if worker.load is None or worker.tokens_in(worker.load.num_free_blocks) < worker.num_prefill_tokens + needed:
            return False
        later_s = worker.wait_s(is_real_time=passes) - least.wait_s(is_real_time=passes)
        spare_s = tracked.first_due_s - seeker.now - needed / worker.prompt_tokens_per_s
        return later_s <= min(_MOST_LATER_S, _SPARE_SHARE * spare_s)

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
        self, chosen: ChosenPrefill, gateways: Mapping[str, str], runs: Mapping[str, int], seeker: _Seeker
    ) -> ChosenPrefill:
        tracked = chosen.tracked
        near = self._placement.near_prefiller(
            gateways.get(tracked.gateway, ""), chosen.worker, is_real_time=self._passes_documents(tracked)
        )
        if near is None or near is chosen.worker:
            return chosen
        if self._lacks_adapter(tracked, near) and not self._lacks_adapter(tracked, chosen.worker):
            return chosen
        if near.is_delayed_by(tracked.num_prefill_tokens):
            return chosen
        hit = hit_of(tracked, near, runs) if runs else NO_HIT
        has_room = self._has_room(near, hit, seeker)
        if hit.num_tokens < chosen.hit.num_tokens or not has_room:
            return chosen
        return ChosenPrefill(tracked, near, hit)


def _begins_gaps(tracked: TrackedRequest) -> bool:
    return tracked.is_real_time and tracked.request.slo.tpot_s is not None and not tracked.num_emitted

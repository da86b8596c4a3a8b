"""Entries into the running batch, and evictions from it: into candidate buffers (AlignedServe, section 3.4, case 3).

1. The victim leaves the engine; its blocks stay taken while they are copied into a prefill worker's memory.
2. The copy is done: the blocks are free, and the request is a candidate again. If the copy failed, it is preempted.
If no buffer has free blocks for its cache, it is preempted only if another request stalls for its blocks.
Where classes are known, best-effort requests leave before real-time ones, and these never to a batch of best effort.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.iterations import BlocksOffloaded, Load, LoadBlocks, OffloadBlocks
from alignedserve.messages.workers import RequestPreempted
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.request import CacheStage, urgent_at_s
from decode_worker.batching.batch_order import BatchOrder, HeldCapacity
from decode_worker.batching.candidates import Candidates
from decode_worker.batching.running_batch import BatchMember, Leaving
from decode_worker.batching.scheduled_batch import DecodeBatch
from decode_worker.state import LoadingCandidate

_MOST_BEST_EFFORT_LOADS = 4  # at a time, where classes are known
_EVICTIONS_PER_ITERATION = 8  # of an outgoing batch, so that a switch is short and its copies keep up

EvictionCommand = OffloadBlocks | RequestPreempted  # the latter for the router


class Evictions:
    """Chooses who leaves the batch and who enters, and holds the requests whose cache is being copied out."""

    def __init__(self, batch: DecodeBatch, candidates: Candidates, order: BatchOrder) -> None:
        self._batch = batch
        self._candidates = candidates
        self._order = order
        self._evicting: dict[RequestId, tuple[Candidate, Leaving]] = {}
        self.num_evictions = 0

    def get(self, request_id: RequestId) -> Candidate | None:
        candidate, _ = self._evicting.get(request_id, (None, None))
        return candidate

    def candidates(self) -> list[Candidate]:
        return [candidate for candidate, _ in self._evicting.values()]

    def evict_outgoing(self, now: float, token_s: float) -> list[OffloadBlocks]:
        if not self._order.is_switching:
            return []
        outgoing = [running for running in self._batch if self._order.is_outgoing(running)]
        self._order.is_switching = bool(outgoing)
        commands: list[OffloadBlocks] = []
        leaving = (running for running in outgoing if not running.is_aborted and not self._stays(running))
        evictable = [running for running in leaving if not self._is_urgent(running, token_s, now)]
        able = (
            running
            for running in sorted(evictable, key=self._eviction_key)
            if self._batch.is_portable(running.request.request_id)
        )
        for running in islice(able, _EVICTIONS_PER_ITERATION):
            commands += self._evict(running)
        return commands

    def free_blocks(self, num_missing: int, *, num_stalled: int) -> list[EvictionCommand]:
        """Evict until enough blocks are being freed; without buffer space, preempt for stalled requests only."""
        commands: list[EvictionCommand] = []
        num_freed = 0
        while num_freed < num_missing and (victim := self._victim()) is not None:
            evicted = self._evict(victim)
            if not evicted and num_freed >= num_stalled:
                break
            num_freed += len(victim.block_ids)
            if not evicted:
                self._batch.drop(victim)
            commands += evicted or [victim.preempted()]
        return commands

    def evicted(self, event: BlocksOffloaded) -> list[EvictionCommand]:
        candidate, leaving = self._evicting.pop(event.command.request_id)
        assert candidate.slot is not None, "evicted to nowhere"
        self._batch.end_eviction(leaving.block_ids)
        is_there = event.runs is not None and self._candidates.space.holds(candidate.slot)
        if candidate.is_aborted or event.runs is None or not is_there:
            self._candidates.space.free(candidate.slot)
            return [] if candidate.is_aborted else [candidate.preempted()]
        candidate.buffer_copy = BlockCopy(event.command.generation, leaving.num_cached, event.runs)
        self._candidates.add(candidate)
        return []

    def _victim(self) -> BatchMember | None:
        able = [running for running in self._batch if not running.is_aborted]
        outgoing = [running for running in able if self._order.is_outgoing(running)]
        if self._batch.num_holding < 2:
            return None
        return min(outgoing or able, key=self._eviction_key, default=None)

    def _evict(self, running: BatchMember) -> list[OffloadBlocks]:
        num_blocks = self._batch.blocks_for(self._batch.num_cached(running))
        slot = self._candidates.space_for_eviction(num_blocks, is_best_effort=not running.is_real_time)
        if slot is None:
            return []
        request_id = running.request.request_id
        leaving = self._batch.begin_eviction(running)
        candidate = Candidate(
            running.request,
            running.attempt,
            running.generated_token_ids,
            running.batch_id,
            stage=CacheStage.BUFFERED,
            slot=slot,
            first_token_s=leaving.first_token_s,
            last_token_s=leaving.last_token_s if leaving.last_token_s is not None else running.granted_s,
            service_s=leaving.service_s,
            granted_s=running.granted_s,
            predicted_output_len=running.predicted_output_len,
        )
        self._evicting[request_id] = candidate, leaving
        self.num_evictions += 1
        offload = OffloadBlocks(
            request_id, running.attempt, leaving.block_ids[:num_blocks], slot.peer, slot.block_ids, slot.generation
        )
        return [offload]

    def _stays(self, running: BatchMember) -> bool:
        has_slo = running.request.slo.tpot_s is not None
        return running.is_real_time and (has_slo or (self._order.knows_classes and self._order.is_best_effort))

    def _is_urgent(self, running: BatchMember, token_s: float, now: float) -> bool:
        if running.is_real_time:
            return False
        due_s = urgent_at_s(running.request, len(running.generated_token_ids), token_s)
        return due_s is not None and due_s <= now

    def _eviction_key(self, running: BatchMember) -> tuple[bool, int, RequestId]:
        return running.is_real_time and self._order.knows_classes, -running.context_len, running.request.request_id

    # --- candidates that enter

    def may_enter(self, now: float) -> Iterator[Candidate]:
        """Yield the candidates that may enter, in order, up to the first that would break what runs; each counts for
        the next."""
        if not self._candidates:
            return
        num_taken = self._batch.num_blocks - self._batch.num_free
        real_time = self._real_time_holding() if self._order.knows_classes else None
        holding = self._batch.num_holding
        chosen = self._order.choose(self._candidates, holding, now, num_blocks=num_taken, real_time=real_time)
        within: Iterable[Candidate] = chosen
        if self._batch.admission is not None:
            loading = self._batch.loading.candidates()
            within = self._batch.admission.within(chosen, loading, now, by_floor=self._order.by_floor)
        for candidate in within:
            is_copied = candidate.stage in (CacheStage.PREFETCHING, CacheStage.RETURNING)
            # An earlier attempt of it may still be being copied, in or out.
            request_id = candidate.request.request_id
            is_still_here = request_id in self._batch.loading or self.get(request_id) is not None
            if not is_copied and not is_still_here:
                yield candidate

    def admitted(self, now: float) -> Iterator[LoadingCandidate]:
        if not self._batch.has_place and not self._order.is_overdue(now):
            return
        num_best_effort = 0
        if self._order.knows_classes:
            num_best_effort = sum(not candidate.is_real_time for candidate in self._batch.loading.candidates())
        for candidate in self.may_enter(now):
            if self._order.knows_classes and not candidate.is_real_time:
                if num_best_effort >= _MOST_BEST_EFFORT_LOADS:
                    continue
                num_best_effort += 1
            block_ids = self._batch.blocks_if_fits(candidate)
            if block_ids is not None:
                yield LoadingCandidate(candidate, block_ids)
            elif candidate.request.request_id != self._order.by_floor:
                return

    def _real_time_holding(self) -> HeldCapacity:
        running = [running for running in self._batch if running.is_real_time]
        loading = [candidate for candidate in self._batch.loading.candidates() if candidate.is_real_time]
        num_blocks = sum(len(running.block_ids) for running in running) + sum(
            candidate.num_copied_blocks for candidate in loading
        )
        return HeldCapacity(len(running) + len(loading), num_blocks)

    def load(self, entering: Iterable[LoadingCandidate]) -> list[LoadBlocks]:
        loads: dict[tuple[bool, str], list[Load]] = {}
        for entry in entering:
            candidate = entry.candidate
            self._order.entered(candidate)
            self._candidates.take(candidate)
            source, copy = self._candidates.copy_of(candidate)
            self._batch.load(entry)
            is_later = self._order.knows_classes and not candidate.is_real_time
            parts = loads.setdefault((is_later, source), [])
            parts.append(Load(candidate.request.request_id, copy, entry.block_ids))
        ordered = sorted(loads.items(), key=lambda item: item[0][0])
        return [LoadBlocks(source, tuple(parts)) for (_, source), parts in ordered]

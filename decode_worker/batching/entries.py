"""Entry of candidates into the running batch: who may, who fits, and the copies that bring their caches in."""

from collections.abc import Iterable, Iterator

from alignedserve.messages.iterations import Load, LoadBlocks
from decode_worker.batching.batch_order import BatchOrder, Holding
from decode_worker.batching.candidates import Candidates
from decode_worker.batching.eviction import Evictions
from decode_worker.batching.scheduled_batch import DecodeBatch
from decode_worker.state import CacheLocation, Candidate, Loading

_MOST_BEST_EFFORT_LOADS = 4  # at a time, where classes are known


class Entries:
    """Reads candidates, batches and objectives; removes the candidates that enter."""

    def __init__(self, batch: DecodeBatch, candidates: Candidates, order: BatchOrder, evictions: Evictions) -> None:
        self._batch = batch
        self._candidates = candidates
        self._order = order
        self._evictions = evictions

    def may_enter(self, now: float) -> Iterator[Candidate]:
        """Return the candidates that may enter, in order, up to the first that would break what runs.

        Each one taken counts for the next, as this is a generator. Candidates being copied are skipped.
        """
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
            is_copied = candidate.location in (CacheLocation.PREFETCHING, CacheLocation.RETURNING)
            # An earlier attempt of it may still be being copied, in or out.
            request_id = candidate.request.request_id
            is_still_here = request_id in self._batch.loading or self._evictions.get(request_id) is not None
            if not is_copied and not is_still_here:
                yield candidate

    def admitted(self, now: float) -> Iterator[Loading]:
        """Return the candidates that fit, in order, up to the first that does not, with blocks of their own.

        Where classes are known, few best-effort ones are copied at a time: a chat's cache comes after these.
        """
        if not self._batch.has_place and not self._order.is_overdue(now):
            return
        num_best_effort = 0
        if self._order.knows_classes:
            num_best_effort = sum(not one.is_real_time for one in self._batch.loading.candidates())
        for candidate in self.may_enter(now):
            if self._order.knows_classes and not candidate.is_real_time:
                if num_best_effort >= _MOST_BEST_EFFORT_LOADS:
                    continue
                num_best_effort += 1
            block_ids = self._batch.blocks_if_fits(candidate)
            if block_ids is not None:
                yield Loading(candidate, block_ids)
            elif candidate.request.request_id != self._order.by_floor:
                return

    def _real_time_holding(self) -> Holding:
        running = [one for one in self._batch if one.is_real_time]
        loading = [candidate for candidate in self._batch.loading.candidates() if candidate.is_real_time]
        num_blocks = sum(len(one.block_ids) for one in running) + sum(
            candidate.num_copied_blocks for candidate in loading
        )
        return Holding(len(running) + len(loading), num_blocks)

    def load(self, entering: Iterable[Loading]) -> list[LoadBlocks]:
        """Copy the caches of these candidates in: where classes are known, a chat's without waiting for documents'."""
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

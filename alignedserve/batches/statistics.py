"""What the driver learns and counts: how fast lines go, when batches will end, and what they have come to."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from alignedserve.batches.eta import Capacity, assumed_rate, quote
from alignedserve.batches.interfaces import ClusterTotals
from alignedserve.batches.log.log_format import LineEnd, LogTotals, ResultRecord
from alignedserve.batches.records import BatchTotals, Risk
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.run import BatchRun
from alignedserve.core.errors import StoreUnavailable

_LEARN_S = 1.0  # between looks at the rate
_RETRY_S = 0.5
_FLEET_S = 5.0  # of workers' time, between looks at what they do
_MAX_RATE_SAMPLES = 64  # lines of one write that lengths are learned from


class BatchStatistics:
    """Everything that batches share. `load` before use."""

    def __init__(self, book: BatchRepository, assumed_tokens_per_s: float, max_in_flight: int) -> None:
        self.capacity = Capacity(tokens_per_s=assumed_tokens_per_s)
        self.harvest = BatchTotals()
        self._book = book
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._max_in_flight = max_in_flight
        self._num_tokens = 0  # since the last look at the rate
        self._looked_s = time.monotonic()
        self._was_busy = False
        self._cluster_totals: ClusterTotals | None = None  # at the last look
        self._saved: tuple[Capacity, BatchTotals] | None = None

    async def load(self) -> None:
        """What earlier lives have learned, as soon as the store answers."""
        while True:
            try:
                self.capacity = await self._book.capacity(self._assumed_tokens_per_s)
                self.harvest = await self._book.harvest()
                if not self.capacity.is_measured:  # the configuration may say something else by now
                    rate = self._assumed_tokens_per_s
                    self.capacity = msgspec.structs.replace(self.capacity, tokens_per_s=rate)
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def note_ended(self, run: BatchRun, records: Sequence[ResultRecord]) -> None:
        """Lines of this batch have their durable record."""
        totals = LogTotals()
        for record in records:
            totals.add(record)
        self.harvest = self.harvest.with_ended(totals.counts(len(records)), totals.usage())
        self._num_tokens += totals.input_tokens + totals.output_tokens
        for record in records[:_MAX_RATE_SAMPLES]:
            if record.end is LineEnd.COMPLETED:
                num_bytes = run.line_bytes(record.line)
                self.capacity = self.capacity.with_line(num_bytes, record.input_tokens, record.output_tokens)

    def quote(self, runs: Sequence[BatchRun], now: float) -> None:
        """Tell every batch when it is expected to end."""
        self._learn_rate(runs)
        workloads = [run.workload(self.capacity) for run in runs]
        for place, run in enumerate(runs):
            others = workloads[:place] + workloads[place + 1 :]
            run.note_quote(quote(workloads[place], others, self.capacity, now))

    async def save(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> None:
        """Keep what was learned and counted, where it has changed. Raises StoreUnavailable."""
        self.harvest = self._standing(runs, now, is_paused=is_paused)
        known = (self.capacity, self.harvest)
        if known != self._saved:
            await self._book.save_learned(*known)
            self._saved = known

    def note_cluster_totals(self, cluster_totals: ClusterTotals | None) -> None:
        """While no rate has been measured: how much of the workers' time others leave. Looks are some seconds apart,
        as workers report about once in one."""
        last = self._cluster_totals
        if cluster_totals is None or (last is not None and cluster_totals.wall_s < last.wall_s):
            self._cluster_totals = None  # no router, or a new one
        elif last is None:
            self._cluster_totals = cluster_totals
        elif cluster_totals.wall_s - last.wall_s >= _FLEET_S:
            self._cluster_totals = cluster_totals
            if not self.capacity.is_measured:
                sums = (
                    cluster_totals.num_tokens - last.num_tokens,
                    cluster_totals.wall_s - last.wall_s,
                    cluster_totals.idle_s - last.idle_s,
                )
                rate = assumed_rate(self._assumed_tokens_per_s, *sums)
                self.capacity = msgspec.structs.replace(self.capacity, tokens_per_s=rate)

    def _learn_rate(self, runs: Sequence[BatchRun]) -> None:
        """From times in which there was enough to do throughout; at first from any in which lines ran."""
        now = time.monotonic()
        seconds = now - self._looked_s
        if seconds < _LEARN_S:
            return
        num_in_flight = sum(run.num_in_flight for run in runs)
        is_busy = num_in_flight * 2 >= self._max_in_flight or (num_in_flight > 0 and not self.capacity.is_measured)
        if is_busy and self._was_busy and self._num_tokens:
            self.capacity = self.capacity.with_rate(self._num_tokens, seconds)
        self._num_tokens, self._looked_s, self._was_busy = 0, now, is_busy

    def _standing(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> BatchTotals:
        quotes = [run.progress.quote for run in runs]
        waiting_since = [run.record.created_s for run in runs if run.num_waiting]
        return msgspec.structs.replace(
            self.harvest,
            num_waiting=sum(run.num_waiting for run in runs),
            num_in_flight=sum(run.num_in_flight for run in runs),
            num_batches=dict(Counter(run.record.status.value for run in runs)),
            num_at_risk=sum(one is not None and one.risk is not Risk.FITS for one in quotes),
            oldest_waiting_s=max(0.0, now - min(waiting_since, default=now)),
            is_paused=is_paused,
        )

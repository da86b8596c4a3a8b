"""Measurements and totals of all batches: throughput, expected ends, lines by outcome."""

import asyncio
import operator
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, assumed_rate, estimate_eta
from alignedserve.batches.interfaces import ClusterTotals
from alignedserve.batches.log.log_format import LineOutcome, LogTotals, ResultRecord
from alignedserve.batches.records import BatchTotals, Risk
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.run import BatchRun
from alignedserve.core.errors import StoreUnavailable

_LEARN_S = 1.0  # between measurements of the rate
_RETRY_S = 0.5
_CLUSTER_S = 5.0  # of workers' time, between looks at their totals
_MAX_LENGTH_SAMPLES = 64  # lines of one write


class BatchStatistics:
    """Throughput and totals of all batches, stored across restarts. Await `load` before use."""

    def __init__(self, repository: BatchRepository, assumed_tokens_per_s: float, max_in_flight: int) -> None:
        self.throughput = ThroughputEstimate(tokens_per_s=assumed_tokens_per_s)
        self.totals = BatchTotals()
        self._repository = repository
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._max_in_flight = max_in_flight
        self._num_tokens = 0  # since the last measurement
        self._measured_s = time.monotonic()
        self._was_busy = False
        self._cluster_totals: ClusterTotals | None = None  # at the last comparison
        self._saved: tuple[ThroughputEstimate, BatchTotals] | None = None

    async def load(self) -> None:
        """Load what earlier drivers measured, as soon as the store answers."""
        while True:
            try:
                self.throughput = await self._repository.throughput(self._assumed_tokens_per_s)
                self.totals = await self._repository.totals()
                if not self.throughput.is_measured:  # the configuration may say something else by now
                    rate = self._assumed_tokens_per_s
                    self.throughput = msgspec.structs.replace(self.throughput, tokens_per_s=rate)
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def note_ended(self, run: BatchRun, records: Sequence[ResultRecord]) -> None:
        """Count lines of a batch whose record is durable, and learn from their lengths."""
        totals = LogTotals()
        for record in records:
            totals.add(record)
        self.totals = self.totals.with_ended(totals.counts(len(records)), totals.usage())
        self._num_tokens += totals.input_tokens + totals.output_tokens
        for record in records[:_MAX_LENGTH_SAMPLES]:
            if record.outcome is LineOutcome.COMPLETED:
                num_bytes = run.line_bytes(record.line)
                self.throughput = self.throughput.with_line(num_bytes, record.input_tokens, record.output_tokens)

    def estimate_etas(self, runs: Sequence[BatchRun], now: float) -> None:
        """Set the expected end of every batch."""
        self._learn_rate(runs)
        remaining = [run.remaining_work(self.throughput) for run in runs]
        for index, run in enumerate(runs):
            others = remaining[:index] + remaining[index + 1 :]
            run.set_eta(estimate_eta(remaining[index], others, self.throughput, now))

    async def save(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> None:
        """Store throughput and totals if they have changed. Raises StoreUnavailable."""
        self.totals = self._current_totals(runs, now, is_paused=is_paused)
        current = (self.throughput, self.totals)
        if current != self._saved:
            await self._repository.save_statistics(*current)
            self._saved = current

    def note_cluster_totals(self, cluster_totals: ClusterTotals | None) -> None:
        """Until a rate has been measured, assume the share of the workers' time that other requests leave. Totals are
        compared over some seconds, as workers report about once per second."""
        last = self._cluster_totals
        if cluster_totals is None or (last is not None and cluster_totals.wall_s < last.wall_s):
            self._cluster_totals = None  # no router, or a new one
        elif last is None:
            self._cluster_totals = cluster_totals
        elif cluster_totals.wall_s - last.wall_s >= _CLUSTER_S:
            self._cluster_totals = cluster_totals
            if not self.throughput.is_measured:
                rate = assumed_rate(self._assumed_tokens_per_s, *map(operator.sub, cluster_totals, last))
                self.throughput = msgspec.structs.replace(self.throughput, tokens_per_s=rate)

    def _learn_rate(self, runs: Sequence[BatchRun]) -> None:
        """Learn from intervals in which enough lines were in flight; at first from any in which lines ran."""
        now = time.monotonic()
        seconds = now - self._measured_s
        if seconds < _LEARN_S:
            return
        num_in_flight = sum(run.num_in_flight for run in runs)
        is_busy = num_in_flight * 2 >= self._max_in_flight or (num_in_flight > 0 and not self.throughput.is_measured)
        if is_busy and self._was_busy and self._num_tokens:
            self.throughput = self.throughput.with_rate(self._num_tokens, seconds)
        self._num_tokens, self._measured_s, self._was_busy = 0, now, is_busy

    def _current_totals(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> BatchTotals:
        etas = [run.progress.eta for run in runs]
        waiting_since = [run.record.created_s for run in runs if run.num_waiting]
        return msgspec.structs.replace(
            self.totals,
            num_waiting=sum(run.num_waiting for run in runs),
            num_in_flight=sum(run.num_in_flight for run in runs),
            num_batches=dict(Counter(run.record.status.value for run in runs)),
            num_at_risk=sum(one is not None and one.risk is not Risk.FITS for one in etas),
            oldest_waiting_s=max(0.0, now - min(waiting_since, default=now)),
            is_paused=is_paused,
        )

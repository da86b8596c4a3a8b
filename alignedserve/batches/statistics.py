"""Measurements and totals of all batches: throughput, expected ends, lines by outcome."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, Throughputs, estimate_eta
from alignedserve.batches.interfaces import ModelState
from alignedserve.batches.line_slots import LineSlots
from alignedserve.batches.log.log_format import LineOutcome, LogTotals, ResultRecord
from alignedserve.batches.model_throughput import LineLength, ThroughputMeter
from alignedserve.batches.records import BatchTotals, Risk
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.run import BatchRun
from alignedserve.core.errors import StoreUnavailable

_RETRY_S = 0.5
_MAX_LENGTH_SAMPLES = 64  # lines of one write


class BatchStatistics:
    """Throughput and totals of all batches, stored across restarts. Await `load` before use."""

    def __init__(self, repository: BatchRepository, assumed_tokens_per_s: float) -> None:
        self.totals = BatchTotals()
        self._repository = repository
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._meter = ThroughputMeter(Throughputs(ThroughputEstimate(tokens_per_s=assumed_tokens_per_s)))
        self._saved: tuple[Throughputs, BatchTotals] | None = None

    @property
    def throughputs(self) -> Throughputs:
        """Throughput of every model's lines."""
        return self._meter.current

    async def load(self) -> None:
        """Load what earlier drivers measured, as soon as the store answers."""
        while True:
            try:
                self._meter = ThroughputMeter(await self._repository.throughputs(self._assumed_tokens_per_s))
                self.totals = await self._repository.totals()
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
        for position, record in enumerate(records):
            if record.outcome is LineOutcome.COMPLETED:
                model = run.model_of_line(record.line)
                self._meter.note_tokens(model, record.input_tokens + record.output_tokens)
                if position < _MAX_LENGTH_SAMPLES:
                    length = LineLength(run.line_bytes(record.line), record.input_tokens, record.output_tokens)
                    self._meter.note_line(model, length)

    def note_states(self, states: Mapping[str, ModelState]) -> None:
        """See ThroughputMeter."""
        self._meter.note_states(states)

    def estimate_etas(self, runs: Sequence[BatchRun], slots: LineSlots, now: float) -> None:
        """Set the expected end of every batch. `slots`: of lines now."""
        self._learn_rates(runs, slots)
        remaining = [run.remaining_work(self.throughputs) for run in runs]
        for index, run in enumerate(runs):
            others = remaining[:index] + remaining[index + 1 :]
            run.set_eta(estimate_eta(remaining[index], others, self.throughputs, now))

    async def save(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> None:
        """Store throughput and totals if they have changed. Raises StoreUnavailable."""
        self.totals = self._current_totals(runs, now, is_paused=is_paused)
        current = (self.throughputs, self.totals)
        if current != self._saved:
            await self._repository.save_statistics(*current)
            self._saved = current

    def _learn_rates(self, runs: Sequence[BatchRun], slots: LineSlots) -> None:
        num_in_flight: dict[str, float] = {}
        for run in runs:
            for model, share in run.model_shares().items():
                num_in_flight[model] = num_in_flight.get(model, 0.0) + share * run.num_in_flight
        self._meter.learn(num_in_flight, {model: slots.limit(model) for model in num_in_flight})

    def _current_totals(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> BatchTotals:
        etas = [run.progress.eta for run in runs]
        waiting_since = [run.record.created_s for run in runs if run.num_waiting]
        return msgspec.structs.replace(
            self.totals,
            num_waiting=sum(run.num_waiting for run in runs),
            num_in_flight=sum(run.num_in_flight for run in runs),
            num_batches=dict(Counter(run.record.status.value for run in runs)),
            num_at_risk=sum(eta is not None and eta.risk is not Risk.FITS for eta in etas),
            oldest_waiting_s=max(0.0, now - min(waiting_since, default=now)),
            is_paused=is_paused,
        )

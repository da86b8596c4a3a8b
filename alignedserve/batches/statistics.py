"""Measurements and totals of all batches: throughput, expected ends, lines by outcome."""

import asyncio
import operator
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, Throughputs, assumed_rate, estimate_eta
from alignedserve.batches.interfaces import ClusterTotals, ModelState
from alignedserve.batches.line_scheduling import LineSlots
from alignedserve.batches.log.log_format import LineOutcome, LogTotals, ResultRecord
from alignedserve.batches.records import BatchTotals, Risk
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.run import BatchRun
from alignedserve.core.errors import StoreUnavailable

_LEARN_S = 1.0  # between measurements of the rate
_CLUSTER_S = 5.0  # of workers' time, between looks at their totals
_MAX_MODELS = 256  # whose estimates are kept; the longest unused one goes first
_RETRY_S = 0.5
_MAX_LENGTH_SAMPLES = 64  # lines of one write
_MAX_ESTIMATES, _MAX_COMPARED = 64, 16_384  # ends at a time, each of which looks at all other batches; all their looks


class LineLength(NamedTuple):
    """One completed line."""

    num_bytes: int
    input_tokens: int
    output_tokens: int


class ThroughputMeter:
    """The estimate of every model that had lines."""

    def __init__(self, throughputs: Throughputs) -> None:
        self._assumed = throughputs.assumed
        self._by_model: dict[str, ThroughputEstimate] = {
            model: estimate
            if estimate.is_measured
            else msgspec.structs.replace(estimate, tokens_per_s=self._assumed.tokens_per_s)
            for model, estimate in throughputs.by_model.items()  # the configuration may assume something else by now
        }
        self._num_tokens: Counter[str] = Counter()  # since the last measurement
        self._measured_s = time.monotonic()
        self._were_busy: frozenset[str] = frozenset()
        self._totals: dict[str, ClusterTotals] = {}  # at the last comparison

    @property
    def current(self) -> Throughputs:
        return Throughputs(self._assumed, self._by_model)

    def note_tokens(self, model: str, num_tokens: int) -> None:
        self._num_tokens[model] += num_tokens

    def note_line(self, model: str, line: LineLength) -> None:
        self._set(model, self._of(model).with_line(*line))

    def note_states(self, states: Mapping[str, ModelState]) -> None:
        """Assume, for models without a measured rate, the share of their workers' time that other requests leave.

        Totals are compared over some seconds, as workers report about once per second.
        """
        self._totals = {model: last for model, last in self._totals.items() if model in states}
        for model, state in states.items():
            last = self._totals.get(model)
            if last is None or state.totals.wall_s < last.wall_s:  # a new router
                self._totals[model] = state.totals
            elif state.totals.wall_s - last.wall_s >= _CLUSTER_S:
                self._totals[model] = state.totals
                if not self._of(model).is_measured:
                    rate = assumed_rate(self._assumed.tokens_per_s, *map(operator.sub, state.totals, last))
                    self._set(model, msgspec.structs.replace(self._of(model), tokens_per_s=rate))

    def learn(self, num_in_flight: Mapping[str, float], limits: Mapping[str, int]) -> None:
        """Learn from an interval in which enough lines of a model were in flight; at first from any with lines.

        `num_in_flight`: lines by model. `limits`: of those.
        """
        now = time.monotonic()
        seconds = now - self._measured_s
        if seconds < _LEARN_S:
            return
        are_busy = frozenset(
            model
            for model, count in num_in_flight.items()
            if count * 2 >= limits[model] or (count > 0 and not self._of(model).is_measured)
        )
        for model in sorted(are_busy & self._were_busy):
            if self._num_tokens[model]:
                self._set(model, self._of(model).with_rate(self._num_tokens[model], seconds))
        self._num_tokens.clear()
        self._measured_s, self._were_busy = now, are_busy

    def _of(self, model: str) -> ThroughputEstimate:
        return self._by_model.get(model, self._assumed)

    def _set(self, model: str, estimate: ThroughputEstimate) -> None:
        by_model = {name: estimate for name, estimate in self._by_model.items() if name != model}
        for oldest in list(by_model)[: max(len(by_model) + 1 - _MAX_MODELS, 0)]:
            del by_model[oldest]
        self._by_model = {**by_model, model: estimate}


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
        return self._meter.current

    async def load(self) -> None:
        while True:
            try:
                self._meter = ThroughputMeter(await self._repository.throughputs(self._assumed_tokens_per_s))
                self.totals = await self._repository.totals()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def note_ended(self, run: BatchRun, records: Sequence[ResultRecord]) -> None:
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
        self._meter.note_states(states)

    def estimate_etas(self, runs: Sequence[BatchRun], slots: LineSlots, now: float) -> None:
        """Set the expected end of every batch; of very many, of those that have the oldest. `slots`: of lines now."""
        self._learn_rates(runs, slots)
        remaining = [run.remaining_work(self.throughputs) for run in runs]
        most = min(_MAX_ESTIMATES, max(1, _MAX_COMPARED // max(len(runs), 1)))
        for index in sorted(range(len(runs)), key=lambda position: _estimated_s(runs[position]))[:most]:
            others = remaining[:index] + remaining[index + 1 :]
            runs[index].set_eta(estimate_eta(remaining[index], others, self.throughputs, now))

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


def _estimated_s(run: BatchRun) -> float:
    eta = run.progress.eta
    return 0.0 if eta is None else eta.estimated_s

"""Measures the throughput of each model's batches, from the tokens of their lines."""

import operator
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, Throughputs, assumed_rate
from alignedserve.batches.interfaces import ClusterTotals, ModelState

_LEARN_S = 1.0  # between measurements of the rate
_CLUSTER_S = 5.0  # of workers' time, between looks at their totals
_MAX_MODELS = 256  # whose estimates are kept; the longest unused one goes first


class LineLength(NamedTuple):
    """One completed line."""

    num_bytes: int
    input_tokens: int
    output_tokens: int


class ThroughputMeter:
    """The estimate of every model that had lines."""

    def __init__(self, throughputs: Throughputs) -> None:
        """`throughputs`: those of an earlier driver."""
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
        """Return the present estimates."""
        return Throughputs(self._assumed, self._by_model)

    def note_tokens(self, model: str, num_tokens: int) -> None:
        """Count tokens of lines that have ended."""
        self._num_tokens[model] += num_tokens

    def note_line(self, model: str, line: LineLength) -> None:
        """Learn the lengths of a completed line."""
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

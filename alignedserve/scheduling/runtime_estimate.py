"""Estimate of a request's running time, linear in its lengths (ALISE, section 3.1), fitted to any cost model."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.table import Floats, Ints, RequestTable

T = TypeVar("T")

_DECISIONS_PER_PROBE = 64
_PROBED_LENGTHS = (128, 256, 512, 1024, 2048)
PROMPT_LENGTHS = (1, *_PROBED_LENGTHS, 4096)


class RequestRuntimeModel(NamedTuple):
    """A prompt of s tokens takes `s T0`, each of its output tokens `alpha s + beta`; seconds."""

    prefill_token_s: float  # T0
    decode_context_s: float  # alpha
    decode_s: float  # beta

    def prefill_s(self, num_tokens: Floats) -> Floats:
        return num_tokens * self.prefill_token_s

    def remaining_s(self, table: RequestTable, num_left: Floats) -> Floats:
        """Return the time that every row still needs, with `num_left` output tokens to come (equations 3 to 5).

        Cache that was dropped counts as a prompt to compute; s is the current context length.
        """
        context_len = table.context_len
        num_remaining = context_len - table.num_cached
        to_prefill = np.where((table.num_generated > 0) & (num_remaining == 1), 0, num_remaining)
        return self.prefill_s(to_prefill) + num_left * (self.decode_context_s * context_len + self.decode_s)


def fit_request_runtime(costs: CostModel) -> RequestRuntimeModel:
    """Fit by least squares to prompts and decodes of one request alone; T0's line goes through the origin."""
    lengths = np.array(_PROBED_LENGTHS, np.float64)
    prefill_s = np.array([alone_s(costs, length, is_prompt=True) for length in _PROBED_LENGTHS])
    decode_s = np.array([alone_s(costs, length, is_prompt=False) for length in _PROBED_LENGTHS])
    from_mean = lengths - lengths.mean()
    slope = float(from_mean @ decode_s / (from_mean @ from_mean))
    return RequestRuntimeModel(
        float(lengths @ prefill_s / (lengths @ lengths)), slope, float(decode_s.mean() - slope * lengths.mean())
    )


class PrefillTimes(NamedTuple):
    """Durations of prompts alone, as measured: a piecewise linear curve, where equation 4 is one line."""

    probed_s: tuple[float, ...]  # of PROMPT_LENGTHS

    def of(self, num_tokens: Ints) -> Floats:
        """Return seconds: interpolated between the measured lengths, beyond them in proportion to the longest."""
        between: Floats = np.interp(num_tokens, PROMPT_LENGTHS, self.probed_s)
        return between * np.maximum(num_tokens / PROMPT_LENGTHS[-1], 1.0)


def measure_prefill_times(costs: CostModel) -> PrefillTimes:
    return PrefillTimes(tuple(alone_s(costs, length, is_prompt=True) for length in PROMPT_LENGTHS))


def alone_s(costs: CostModel, num_tokens: int, *, is_prompt: bool) -> float:
    """Return the seconds of a prompt of this many tokens, or of a decode after as many, alone."""
    work = IterationWork()
    if is_prompt:
        work.add_chunk(num_tokens, 0, is_last=True)
    else:
        work.add_decode(num_tokens)
    return costs.iteration_s(work)


def remaining_output_len(table: RequestTable) -> tuple[Floats, Ints]:
    """Return the predicted output tokens left for every row, and how often it has overrun its prediction.

    Each overrun doubles the prediction: after k of them it is 2^k as long, the least that exceeds what is generated,
    but never more than the client's limit. Example: predicted 10, generated 25: 40, two overruns, 15 to go.
    """
    exponent = np.frexp(table.num_generated / table.predicted_len)[1].astype(np.int64)
    num_overruns = np.maximum(exponent, 0)
    doubled = np.ldexp(table.predicted_len, num_overruns)
    return np.maximum(np.minimum(doubled, table.max_tokens) - table.num_generated, 1.0), num_overruns


class RefreshedEstimate(Generic[T]):
    """An estimate from a cost model: given, or refreshed now and then, as a live worker's costs are learned."""

    def __init__(self, probe: Callable[[CostModel], T], given: T | None = None) -> None:
        self._probe = probe
        self._given = given
        self._probed = given
        self._num_asked = 0

    def of(self, costs: CostModel) -> T:
        if self._probed is None or (self._given is None and self._num_asked % _DECISIONS_PER_PROBE == 0):
            self._probed = self._probe(costs)
        self._num_asked += 1
        return self._probed

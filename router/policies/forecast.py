"""Forecasts of output lengths and of the time until the queue has drained."""

import math

from alignedserve.core.request import Request, RequestClass

_WINDOW = 64.0  # observations that weigh in a running mean
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0
_MEMORY_S = 30.0  # of time with a queue: what was computed longer ago counts for less than 1 / e


class OutputLengthForecast:
    """Running mean of output lengths per request class, capped by the request's own limit."""

    def __init__(self) -> None:
        self._mean: dict[RequestClass, float] = {}

    def predict(self, request: Request) -> float:
        limit = float(request.sampling.max_tokens)
        return min(limit, self._mean.get(request.request_class, limit))

    def observe(self, request: Request, num_generated: int) -> None:
        mean = self._mean.get(request.request_class, float(num_generated))
        self._mean[request.request_class] = mean + (num_generated - mean) / _WINDOW


def doubled_past(expected_len: float, num_generated: int, limit: int) -> float:
    """Double a prediction that was overrun until it is not, up to the limit (ALISE, section 3.2)."""
    while 0.0 < expected_len <= num_generated:
        expected_len *= 2.0
    return min(expected_len, float(limit))


class DrainForecast:
    """Time until a queue of tokens has drained, by the rate at which tokens left it while others waited."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0  # computed, and in what time; both fade
        self._last_s: float | None = None

    def observe(self, num_tokens: int, now: float) -> None:
        """Learn that `num_tokens` left since the last call.

        Several may leave at the same moment: what counts is their sum by the time, not each one's rate.
        """
        if self._last_s is not None:
            seconds = max(now - self._last_s, 0.0)
            kept = math.exp(-seconds / _MEMORY_S)
            self._num_tokens = kept * self._num_tokens + num_tokens
            self._seconds = kept * self._seconds + seconds
        self._last_s = now

    def idle(self) -> None:
        """Learn that the queue is empty: the next interval says nothing about the rate."""
        self._last_s = None

    def seconds_for(self, num_tokens: int) -> float:
        """Return the predicted seconds for this many tokens, between 1 and 120 s; 1 s while no rate is known."""
        expected_s = self.expected_s(num_tokens)
        return _MIN_RETRY_S if expected_s is None else min(_MAX_RETRY_S, max(_MIN_RETRY_S, expected_s))

    def expected_s(self, num_tokens: float) -> float | None:
        """Return the predicted seconds for this many tokens; None while no rate is known."""
        return None if (rate := self.tokens_per_s) is None else num_tokens / rate

    @property
    def tokens_per_s(self) -> float | None:
        return self._num_tokens / self._seconds if self._num_tokens and self._seconds else None

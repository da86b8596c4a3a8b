"""Forecasts of output lengths and of the time until the queue has drained."""

from alignedserve.core.request import Request, RequestClass

_WINDOW = 64.0  # observations that weigh in a running mean
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0


class OutputLengthForecast:
    """Running mean of output lengths per request class, capped by the request's own limit."""

    def __init__(self) -> None:
        self._mean: dict[RequestClass, float] = {}

    def predict(self, request: Request) -> float:
        """Return the expected number of output tokens."""
        limit = float(request.sampling.max_tokens)
        return min(limit, self._mean.get(request.request_class, limit))

    def observe(self, request: Request, num_generated: int) -> None:
        """Learn from a finished request."""
        mean = self._mean.get(request.request_class, float(num_generated))
        self._mean[request.request_class] = mean + (num_generated - mean) / _WINDOW


def doubled_past(expected_len: float, num_generated: int, limit: int) -> float:
    """Double a prediction that was overrun until it is not, up to the limit (ALISE, section 3.2)."""
    while 0.0 < expected_len <= num_generated:
        expected_len *= 2.0
    return min(expected_len, float(limit))


class DrainForecast:
    """Time until a queue of tokens has drained, by the rate at which tokens were computed while any waited."""

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._last_s: float | None = None

    def observe(self, num_tokens: int, now: float) -> None:
        """Learn that `num_tokens` were computed since the last call."""
        if self._last_s is not None and now > self._last_s:
            rate = num_tokens / (now - self._last_s)
            known = self._tokens_per_s
            self._tokens_per_s = rate if known is None else known + (rate - known) / 8.0
        self._last_s = now

    def idle(self) -> None:
        """Learn that the queue is empty: the next interval says nothing about the rate."""
        self._last_s = None

    def seconds_for(self, num_tokens: int) -> float:
        """Return the predicted seconds for this many tokens, between 1 and 120 s; 1 s while no rate is known."""
        if not self._tokens_per_s:
            return _MIN_RETRY_S
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_tokens / self._tokens_per_s))

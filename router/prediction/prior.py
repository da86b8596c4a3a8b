"""The prediction made while too few requests have finished to learn from."""

from alignedserve.core.request import Request, RequestClass
from router.policies.forecast import OutputLengthForecast


class LengthPrior:
    """Mean output length per request class and power of two of the prompt length.

    Falls back to the mean of the class, and to the request's own limit while no request of its class has finished.
    """

    def __init__(self) -> None:
        self._by_class = OutputLengthForecast()
        self._by_length: dict[tuple[RequestClass, int], OutputLengthForecast] = {}

    def predict(self, request: Request) -> float:
        """Return the expected number of output tokens, never above the request's limit."""
        return self._by_length.get(_kind(request), self._by_class).predict(request)

    def observe(self, request: Request, num_generated: int) -> None:
        """Learn from a finished request."""
        self._by_class.observe(request, num_generated)
        self._by_length.setdefault(_kind(request), OutputLengthForecast()).observe(request, num_generated)


def _kind(request: Request) -> tuple[RequestClass, int]:
    return request.request_class, request.prompt_len.bit_length()

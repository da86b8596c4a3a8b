"""The bound on requests that one gateway has open, for all models together."""

from alignedserve.api.errors import Overloaded


class RequestLimiter:
    """Counts the requests that this gateway has open in the cluster and bounds them."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self.num_open = 0

    def acquire(self, count: int) -> None:
        """Open requests. Raises Overloaded when that would be too many."""
        if self.num_open + count > self._max_open:
            raise Overloaded("The gateway has too many requests open.", retry_after_s=1.0)
        self.num_open += count

    def release(self, count: int) -> None:
        """Close requests."""
        self.num_open -= count
        assert self.num_open >= 0, "more requests closed than opened"

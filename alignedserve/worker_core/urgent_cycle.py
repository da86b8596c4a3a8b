"""Real-time prompts that come while an iteration is in flight, and the urgent iteration within it: of any worker."""

from collections.abc import Iterable

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import IterationCompleted


class UrgentCycle:
    """What has come during the pass in flight, whether an urgent iteration runs, and the end of the pass that waits.

    One urgent iteration at a time. A pass that ends before it could stop is dealt with after the urgent one.
    """

    def __init__(self) -> None:
        self._came: dict[RequestId, None] = {}  # and have no token yet
        self._has_news = False  # since they were last asked for
        self._is_running = False
        self._kept: IterationCompleted | None = None

    @property
    def may_begin(self) -> bool:
        """True if something has changed since it was last asked what has come, and no urgent iteration runs."""
        return self._has_news and not self._is_running

    def came(self, request_id: RequestId) -> None:
        """Note a real-time request that has come, or can be computed now."""
        self._came[request_id] = None
        self._has_news = True

    def pass_began(self) -> None:
        """Note that an iteration has begun: its policy has seen all that came before."""
        self._came.clear()
        self._has_news = False

    def ask(self) -> list[RequestId]:
        """Return what has come, in that order, of which an urgent iteration may be made now."""
        self._has_news = False
        return list(self._came)

    def keep(self, request_ids: Iterable[RequestId]) -> None:
        """Forget all but these."""
        self._came = dict.fromkeys(request_ids)

    def began(self) -> None:
        """Note that an urgent iteration has begun."""
        assert not self._is_running, "two urgent iterations at once"
        self._is_running = True

    def keeps(self, event: IterationCompleted) -> bool:
        """Keep the end of the pass until that of the urgent iteration; return whether it did."""
        if event.is_urgent or not self._is_running:
            return False
        self._kept = event
        return True

    def end(self) -> IterationCompleted | None:
        """Note the end of the urgent iteration, which has been dealt with; return that of the pass, if it was kept."""
        assert self._is_running, "an urgent iteration ended that was not begun"
        self._is_running, self._has_news = False, bool(self._came)
        kept, self._kept = self._kept, None
        return kept

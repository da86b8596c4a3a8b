"""What a worker tells its router: who it is, how it is loaded, and about once a second what its ledger gained."""

from alignedserve.messages.events import Send
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import IterationLogReport, WorkerLoad, WorkerRegistered
from decode_worker.iteration_log.iteration_log import IterationLog


class RouterReports:
    """Knows the router, and what it was told last. Without a router nothing is sent."""

    def __init__(self, registered: WorkerRegistered, ledger: IterationLog) -> None:
        self._registered = registered
        self._ledger = ledger
        self._router: str | None = None
        self._reported: WorkerLoad | None = None

    def linked(self, router: str) -> list[Send]:
        """A router came (back), and knows nothing of this worker."""
        self._router = router
        self._reported = None
        return self.send(self._registered)

    def send(self, message: Message) -> list[Send]:
        """To the router, if there is one."""
        return [Send(self._router, message)] if self._router is not None else []

    @property
    def is_load_awaited(self) -> bool:
        """Whether the router is to have the load even if nothing has changed."""
        return self._reported is None

    def await_load(self) -> None:
        """The router waits for the load, even if it is as before."""
        self._reported = None

    def load(self, load: WorkerLoad) -> list[Send]:
        """The load, where it has changed."""
        if self._router is None or load == self._reported:
            return []
        self._reported = load
        return self.send(load)

    def totals(self, now: float) -> list[Send]:
        """What the ledger gained, about once a second; kept until there is a router."""
        gained = self._ledger.take_totals(now) if self._router is not None else None
        return self.send(IterationLogReport(gained)) if gained is not None else []

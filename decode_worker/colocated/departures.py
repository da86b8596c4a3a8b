"""Requests that this worker hands over to others of its node, with their caches; see moves.py."""

from collections.abc import Sequence

from typing_extensions import override

from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BufferOpened, CloseBuffer, OpenBuffer
from alignedserve.messages.workers import MoveRequest
from alignedserve.worker_core.router_link import RouterLink
from decode_worker.colocated.handoffs import Departing, HandoffCommand, Handoffs
from decode_worker.held_requests import HeldRequests

DepartureCommand = HandoffCommand | OpenBuffer | CloseBuffer


class Departures(Handoffs):
    """The buffers lent to other workers, and the requests on their way into them."""

    def __init__(self, held: HeldRequests, router: RouterLink, block_size: int) -> None:
        super().__init__(held, block_size)
        self._router = router
        self._link_epochs: dict[str, int] = {}
        self._num_link_epochs = 0
        self._lent: dict[str, None] = {}  # workers that have a buffer here

    # --- other workers

    def connected(self, peer: str) -> list[DepartureCommand]:
        """Open a buffer for a worker that is new or back."""
        self._num_link_epochs += 1
        self._link_epochs[peer] = self._num_link_epochs
        return [OpenBuffer(peer, self._num_link_epochs)]

    def opened(self, event: BufferOpened) -> list[DepartureCommand]:
        """Offer the buffer to the worker that it was made for, if that one is still connected."""
        if self._link_epochs.get(event.peer) != event.link_epoch or event.offered is None:
            return []
        self._lent[event.peer] = None
        return [Send(event.peer, event.offered)]

    def disconnected(self, peer: str, now: float) -> list[DepartureCommand]:
        """Close the buffer of a worker that is gone; what was not offered to it stays."""
        del self._link_epochs[peer]
        self._lent.pop(peer, None)
        return [CloseBuffer(peer), *self.lost(peer, now)]

    # --- one request

    def ordered(self, message: MoveRequest, now: float) -> list[DepartureCommand]:
        """Ask the receiver for blocks, if the request can leave."""
        request_id, attempt, target = message.request_id, message.attempt, str(message.to)
        tracked = self._held.get(request_id)
        is_current = tracked is not None and tracked.attempt == attempt
        if tracked is None or not is_current or target not in self._lent or not self.can_ask(tracked):
            return [*self._router.stayed(request_id, attempt)]
        return [*self.ask(tracked, target)]

    @override
    def _stayed(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        return self._router.stayed(entry.tracked.request.request_id, entry.tracked.attempt)

    @override
    def _left(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        return ()  # its receiver tells the router

    @override
    def _offered_to_lost(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        self._end(entry)  # the router alone can know whether it was taken
        return self._router.send(entry.tracked.preempted())

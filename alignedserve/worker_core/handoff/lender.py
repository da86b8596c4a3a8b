"""Buffers in a worker's memory for others: one for every linked worker, which alone decides what lies where in its own.

A buffer is as old as the link: one that was made for an earlier link of the same worker is not offered.
"""

from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BufferOpened, CloseBuffer, OpenBuffer


class Lender:
    """The workers that are linked, and which of them have a buffer here."""

    def __init__(self) -> None:
        self._link_epochs: dict[str, int] = {}  # of the workers linked now
        self._num_link_epochs = 0
        self._lent: dict[str, None] = {}

    def lends_to(self, peer: str) -> bool:
        """Return whether this worker is linked and was offered its buffer."""
        return peer in self._lent

    def link_epoch(self, peer: str) -> int | None:
        """Return the number of the link to this worker; None: there is none."""
        return self._link_epochs.get(peer)

    def connected(self, peer: str) -> OpenBuffer:
        """Open a buffer for a worker that is new or back."""
        self._num_link_epochs += 1
        self._link_epochs[peer] = self._num_link_epochs
        return OpenBuffer(peer, self._num_link_epochs)

    def opened(self, event: BufferOpened) -> list[Send]:
        """Offer the buffer to the worker that it was made for, if that is still linked."""
        if self._link_epochs.get(event.peer) != event.link_epoch or event.offered is None:
            return []
        self._lent[event.peer] = None
        return [Send(event.peer, event.offered)]

    def disconnected(self, peer: str) -> CloseBuffer:
        """Close the buffer of a worker that is gone."""
        del self._link_epochs[peer]
        self._lent.pop(peer, None)
        return CloseBuffer(peer)

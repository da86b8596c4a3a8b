"""Messages held back until what their requests need is prepared on another thread, so that no iteration waits for it.

Messages about one request stay in order, and so do batches that one pool grants; all others pass.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from alignedserve.messages.caches import BatchGranted
from alignedserve.messages.wire import Message

Prepare = Callable[[Message], "Sequence[Future[Any]]"]


class _Held(NamedTuple):
    peer: str
    message: Message
    subjects: frozenset[str]  # what it is about: another message about one of these stays behind it
    prepared: Sequence[Future[Any]]

    @property
    def is_ready(self) -> bool:
        return all(one.done() for one in self.prepared)


class HeldMessages:
    """Delivers messages, at once or once they are prepared. Used on one event loop."""

    def __init__(self, prepare: Prepare, deliver: Callable[[str, Message], None]) -> None:
        """`prepare`: begins what a message needs, and returns what it has to wait for. `deliver`: takes the peer and
        the message."""
        self._prepare = prepare
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._held: list[_Held] = []

    def take(self, peer: str, message: Message) -> None:
        """Deliver the message, now or later."""
        prepared = [one for one in self._prepare(message) if not one.done()]
        if not prepared and not self._held:
            self._deliver(peer, message)
            return
        held = _Held(peer, message, _subjects_of(peer, message), prepared)
        if not prepared and not any(held.subjects & earlier.subjects for earlier in self._held):
            self._deliver(peer, message)
            return
        self._held.append(held)
        for one in prepared:
            one.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._release))

    def drop(self, peer: str) -> None:
        """Drop the messages of a peer that is lost, as if they had not arrived."""
        self._held = [one for one in self._held if one.peer != peer]
        self._release()

    def close(self) -> None:
        """Deliver nothing more."""
        self._held.clear()

    def _release(self) -> None:
        """Deliver what is prepared and behind nothing that is not."""
        waiting, self._held = self._held, []
        subjects: set[str] = set()
        for held in waiting:
            if held.is_ready and not held.subjects & subjects:
                self._deliver(held.peer, held.message)
            else:
                subjects |= held.subjects
                self._held.append(held)


def _subjects_of(peer: str, message: Message) -> frozenset[str]:
    if isinstance(message, BatchGranted):  # one may join that before it
        return frozenset((peer, *(handoff.request.request_id for handoff in message.handoffs)))
    about = getattr(message, "request", message)
    request_id: str | None = getattr(about, "request_id", None)
    return frozenset() if request_id is None else frozenset((request_id,))

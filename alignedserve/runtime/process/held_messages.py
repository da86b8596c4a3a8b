"""Messages held back until what their requests need is prepared on another thread, so that no iteration waits for it.

Messages about one request stay in order; those about others pass.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest

Prepare = Callable[[Message], "Future[Any] | None"]


class _Held(NamedTuple):
    peer: str
    message: Message


class HeldMessages:
    """Delivers messages, at once or once they are prepared. Used on one event loop."""

    def __init__(self, prepare: Prepare, deliver: Callable[[str, Message], None]) -> None:
        """`prepare`: begins what a message needs; None: nothing. `deliver`: takes the peer and the message."""
        self._prepare = prepare
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._held: dict[RequestId, list[_Held]] = {}

    def take(self, peer: str, message: Message) -> None:
        """Deliver the message, now or later."""
        prepared, request_id = self._prepare(message), _request_id_of(message)
        if request_id in self._held:
            self._held[request_id].append(_Held(peer, message))
        elif not isinstance(message, PrefillRequest) or prepared is None or prepared.done():
            self._deliver(peer, message)
        else:
            own_id = message.request.request_id
            self._held[own_id] = [_Held(peer, message)]
            prepared.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._release, own_id))

    def drop(self, peer: str) -> None:
        """Drop the messages of a peer that is lost, as if they had not arrived."""
        for held in self._held.values():
            held[:] = [one for one in held if one.peer != peer]

    def close(self) -> None:
        """Deliver nothing more."""
        self._held.clear()

    def _release(self, request_id: RequestId) -> None:
        for peer, message in self._held.pop(request_id, ()):
            self._deliver(peer, message)


def _request_id_of(message: Message) -> RequestId | None:
    if isinstance(message, PrefillRequest):
        return message.request.request_id
    request_id: RequestId | None = getattr(message, "request_id", None)
    return request_id

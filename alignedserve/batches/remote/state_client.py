"""A gateway's side of the state server: one link, on which calls wait for their answers."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TypeVar

from alignedserve.core.errors import StorageDamaged, StorageError, StorageFull, StoreFull, StoreUnavailable
from alignedserve.messages.state import Answer, Call, CallFailed, StateAnswer, StateCall, StateClientInbound
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import AddressBook
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer

logger = logging.getLogger(__name__)

STATE = "state"  # the server's name
_TIMEOUT_S = 5.0
_LINK_S = 3.0  # a server that is being restarted is waited for this long: two seconds on two cores
_ERRORS: dict[str, type[StorageError]] = {
    kind.__name__: kind for kind in (StorageError, StoreUnavailable, StoreFull, StorageFull, StorageDamaged)
}

AnswerT = TypeVar("AnswerT", bound=Answer)


class StateClient:
    """Calls the state server, from `start` to `close`."""

    def __init__(self, identity: Identity, book: AddressBook | None) -> None:
        self._links = LinkManager(identity, Codec(StateClientInbound), self, book)
        self._server: str | None = None  # its name while linked
        self._is_linked = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)
        self.on_new_link: Callable[[], None] | None = None  # called when a server is linked, perhaps another process

    def start(self) -> None:
        """Dial the server, and again whenever the link is lost."""
        self._links.dial(STATE)

    async def close(self) -> None:
        """Close the link; calls under way fail."""
        self._fail_all()
        await self._links.close()

    async def call(self, call: Call, kind: type[AnswerT], timeout_s: float = _TIMEOUT_S) -> AnswerT:
        """Return the answer to a call. Raises StorageError as the server did, or StoreUnavailable when it does not
        answer: then the call may or may not have been carried out."""
        try:
            async with asyncio.timeout(min(_LINK_S, timeout_s)):
                await self._is_linked.wait()
        except TimeoutError as error:
            raise _unavailable() from error
        call_id = next(self._ids)
        answered = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            if self._server is None or not self._links.send(self._server, StateCall(call_id, call)):
                raise _unavailable()
            async with asyncio.timeout(timeout_s):
                answer = await answered
        except TimeoutError as error:
            raise _unavailable() from error
        finally:
            self._waiting.pop(call_id, None)
        if isinstance(answer, CallFailed):
            raise _ERRORS.get(answer.error, StorageError)(answer.reason)
        if not isinstance(answer, kind):
            raise StoreUnavailable("The head gave an answer to another call.")
        return answer

    # --- LinkHandler

    def on_linked(self, peer: Peer) -> None:
        """Send calls from now on."""
        self._server = peer.name
        if self.on_new_link is not None:
            self.on_new_link()
        self._is_linked.set()

    def on_lost(self, peer: Peer) -> None:
        """Fail the calls that wait for answers."""
        self._server = None
        self._is_linked.clear()
        self._fail_all()

    def on_message(self, peer: Peer, message: Message) -> None:
        """Pass an answer on, or drop it when nobody waits for it any more."""
        assert isinstance(message, StateAnswer), "a message of no union of this client"
        waiting = self._waiting.get(message.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answer)

    def _fail_all(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(CallFailed(StoreUnavailable.__name__, str(_unavailable())))


def _unavailable() -> StoreUnavailable:
    return StoreUnavailable("The head, which keeps files and batches, cannot be reached now.")

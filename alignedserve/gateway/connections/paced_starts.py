"""Lets a few requests begin in each turn of the event loop: streams go on while a thousand clients come at once."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

_PER_TURN = 4  # to begin one takes from a third of a millisecond to one


@dataclass(slots=True)
class _Client:
    requests: deque[asyncio.Future[None]] = field(default_factory=deque)  # in the order in which they came
    takes_last: bool = False

    def take_next(self) -> asyncio.Future[None]:
        begins = self.requests.pop() if self.takes_last else self.requests.popleft()
        self.takes_last = not self.takes_last
        return begins


class PacedStarts:
    """The requests that wait for their turn, of one loop.

    Clients have turns one after the other, so that nobody waits for all that another one sends at once. Of one client
    the request that came first and the one that came last begin by turns: a chat is not behind all documents that its
    client sent before it, and nothing waits for all that comes after it.
    """

    def __init__(self) -> None:
        self._num_begun = 0  # in this turn
        self._waiting: dict[str, _Client] = {}  # the one whose turn is next first

    async def turn(self, client: str) -> None:
        """Return in the turn in which a request of this client may begin: in this one, unless many came with it."""
        loop = asyncio.get_running_loop()
        if self._num_begun >= _PER_TURN:
            begins = loop.create_future()
            self._waiting.setdefault(client, _Client()).requests.append(begins)
            await begins
            return
        if not self._num_begun:
            loop.call_soon(self._next_turn)
        self._num_begun += 1

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < _PER_TURN:
            begins = self._take_next()
            if not begins.done():  # else its client has left
                begins.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _take_next(self) -> asyncio.Future[None]:
        client = next(iter(self._waiting))
        own = self._waiting.pop(client)
        begins = own.take_next()
        if own.requests:
            self._waiting[client] = own
        return begins

"""Lets a few requests begin in each turn of the event loop: streams go on while a thousand clients come at once."""

import asyncio

from alignedserve.process.turn_threads import ClientTurns

_PER_TURN = 4  # to begin one takes from a third of a millisecond to one


class PacedStarts:
    """The requests that wait for their turn, of one loop.

    Clients have turns one after the other, so that nobody waits for all that another one sends at once. Of one client
    the request that came first and the one that came last begin by turns: a chat is not behind all documents that its
    client sent before it, and nothing waits for all that comes after it.
    """

    def __init__(self) -> None:
        self._num_begun = 0  # in this turn
        self._waiting: ClientTurns[asyncio.Future[None]] = ClientTurns(from_both_ends=True)

    async def turn(self, client: str) -> None:
        """Return in the turn in which a request of this client may begin: in this one, unless many came with it."""
        loop = asyncio.get_running_loop()
        if self._num_begun >= _PER_TURN:
            begins = loop.create_future()
            self._waiting.append(client, begins)
            await begins
            return
        if not self._num_begun:
            loop.call_soon(self._next_turn)
        self._num_begun += 1

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < _PER_TURN:
            begins = self._waiting.take()
            if not begins.done():  # else its client has left
                begins.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)

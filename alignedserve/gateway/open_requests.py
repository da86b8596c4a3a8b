"""Open requests of keys that may have only so many: counted for all gateways together by the state server.

A request waits for one answer of it; keys without such a limit for none. Without a state server, and while it cannot be
reached, a gateway goes by its equal part of the limit; one that joined later, without a part, refuses as unavailable.
"""

import asyncio
import time
from collections.abc import Sequence

from alignedserve.api.errors import QuotaExceeded, Unavailable
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import StorageError
from alignedserve.keys.entry import KeyEntry, Limit
from alignedserve.keys.open_counts import OpenCounts, OpenStatement, Verdict, Wish
from alignedserve.keys.quotas import LEASE_S, share_of_open
from alignedserve.messages.state import OpenStated, StateOpen
from alignedserve.process.background_tasks import start_background

_STATED_EVERY_S = LEASE_S / 5
_ASKED_AGAIN_S = LEASE_S / 10
_ANSWER_S = 0.5
_RETRY_S = 1.0  # of a client


class OpenRequests:
    """Counts them. Where there is a state server, between `start` and `stop`."""

    def __init__(self, gateway: str, gateways: Sequence[str], process_id: str, client: StateClient | None) -> None:
        """`gateways`: that have a part of every limit; none: this is the only one. `client`: None: there is no server.
        `process_id`: no other process of this gateway's name has it."""
        self._gateway = gateway
        self._gateways = tuple(gateways)
        self._client = client
        self._counts = OpenCounts(gateway, process_id, time.monotonic())
        self._tasks: list[asyncio.Task[None]] = []
        self._has_ended = asyncio.Event()

    def start(self) -> None:
        if self._client is not None:
            self._tasks = [
                start_background(self._state_all(), "statements of what is open"),
                start_background(self._state_ends(), "statements of what has ended"),
            ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def open(self, key: KeyEntry) -> None:
        """Count a request as open until `close`. Raises QuotaExceeded, Unavailable."""
        limit = key.open_requests
        if limit is None:
            return
        while self._client is not None and not self._counts.is_cut_off(time.monotonic()):
            verdict = await self._ask(Wish(key.owner, limit))
            if verdict is Verdict.IN:
                return
            if verdict is Verdict.FULL:
                raise _exceeded(key, limit)
            await asyncio.sleep(_ASKED_AGAIN_S)
        self._open_here(key, limit)

    def close(self, key: KeyEntry) -> None:
        """Count a request that was opened with this entry as open no more. Does not wait."""
        if key.open_requests is not None:
            self._end(key.owner)

    def _open_here(self, key: KeyEntry, limit: int) -> None:
        most = share_of_open(limit, self._gateways, self._gateway)
        if not most and self._gateway not in self._gateways:
            raise Unavailable("This gateway joined later, and cannot count requests without the head's state server.")
        if self._counts.of(key.owner) >= most:
            raise _exceeded(key, limit, "" if most == limit else f", of which this gateway has {most}")
        self._counts.begin(key.owner)

    def _end(self, owner: str) -> None:
        self._counts.end(owner)
        self._has_ended.set()

    async def _ask(self, wish: Wish) -> Verdict:
        self._counts.begin(wish.key)
        verdict = Verdict.AGAIN
        try:
            verdict = await self._state(self._counts.asking(wish)) or Verdict.AGAIN
        finally:  # also where the client has gone meanwhile
            if verdict is not Verdict.IN:
                self._end(wish.key)
        return verdict

    async def _state(self, statement: OpenStatement) -> Verdict | None:
        assert self._client is not None, "a statement without a state server"
        message = StateOpen(
            statement.process_id, statement.number, dict(statement.num_open), statement.is_whole, statement.wish
        )
        try:
            answer = await self._client.call(message, OpenStated, _ANSWER_S)
        except StorageError:
            return None
        self._counts.on_answer(time.monotonic())
        return answer.verdict

    async def _state_all(self) -> None:
        while True:
            await self._state(self._counts.whole())
            await asyncio.sleep(_STATED_EVERY_S)

    async def _state_ends(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            if self._counts.has_ended:
                await self._state(self._counts.ended())


def _exceeded(key: KeyEntry, limit: int, more: str = "") -> QuotaExceeded:
    message = f"Rate limit reached for the key {key.name} on {Limit.OPEN.value}: Limit {limit}{more}."
    return QuotaExceeded(message, retry_after_s=_RETRY_S)

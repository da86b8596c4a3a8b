"""Requests per minute of each key: counted for all gateways together, by the state server; without one, here alone.

A request waits for one answer of the state server, where requests are limited at all. Of a gateway that cannot reach it
the first requests wait until its lease is over (LEASE_S at most); then its own share of the limit applies, and one that
joined later, without a share, refuses them as unavailable.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence

from alignedserve.api.errors import QuotaExceeded, Unavailable
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import StorageError
from alignedserve.core.quotas import LEASE_S, OwnShare
from alignedserve.keys.entry import KeyEntry
from alignedserve.keys.ring import CurrentKeys
from alignedserve.messages.state import QuotaAnswer, UseQuota
from alignedserve.process.background_tasks import start_background

_SIGN_OF_LIFE_S = LEASE_S / 5
_ANSWER_S = 0.5


class RequestQuotas:
    """Counts requests. Where there is a state server, between `start` and `stop`."""

    def __init__(
        self,
        requests_per_minute: int | None,
        keys: CurrentKeys,
        *,
        gateway: str = "",
        gateways: Sequence[str] = (),
        client: StateClient | None = None,
        is_first_process: bool = True,
    ) -> None:
        """`gateways`: that are there from the start, and have a share of every limit; none: this is the only one.
        `client`: None: there is no state server. `is_first_process`: none of this name ran before."""
        self._per_minute = requests_per_minute
        self._gateway = gateway
        self._client = client
        self._numbers = {owner: number for number, owner in enumerate(keys.ring.owners)}
        share = 1.0 if not gateways else (gateway in gateways) / len(gateways)
        self._has_share = share > 0.0
        now = time.monotonic()
        self._share = OwnShare(share * (requests_per_minute or 0), len(self._numbers), secrets.token_hex(8), now)
        if client is not None or not is_first_process:
            self._share.begin_used_up(now, is_first_process=is_first_process)
        if client is not None:
            client.on_new_link = lambda: self._share.on_new_link(time.monotonic())
        self._signs: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Give signs of life, so that this gateway's share can be used by others."""
        if self._client is not None and self._per_minute is not None:
            self._signs = start_background(self._give_signs(), "the count of requests")

    def stop(self) -> None:
        """Stop. May be repeated."""
        if self._signs is not None:
            self._signs.cancel()

    async def count(self, key: KeyEntry) -> None:
        """Count one request. Raises QuotaExceeded with the time until the next one is allowed, or Unavailable where it
        cannot be counted."""
        if self._per_minute is None:
            return
        wait_s = await self._take(self._numbers[key.owner])
        if wait_s:
            raise QuotaExceeded(f"This key may make {self._per_minute} requests per minute.", retry_after_s=wait_s)

    async def _take(self, key_number: int) -> float:
        while (leased_s := self._share.seconds_leased(time.monotonic())) > 0.0:
            answer = await self._call(key_number)
            if answer is None:
                await asyncio.sleep(min(leased_s, _SIGN_OF_LIFE_S))
            elif answer.is_member:
                return answer.wait_s
        if not self._has_share:
            raise Unavailable("This gateway joined later, and cannot count requests without the head's state server.")
        return self._share.take(key_number, time.monotonic())

    async def _call(self, key_number: int | None = None) -> QuotaAnswer | None:
        assert self._client is not None, "a count elsewhere without a state server"
        call = self._share.call(self._gateway, key_number, time.monotonic())
        message = UseQuota(call.process_id, call.seen_s, call.spent, call.key_number)
        try:
            answer = await self._client.call(message, QuotaAnswer, _ANSWER_S)
        except StorageError:
            return None
        self._share.on_answer(answer.clock_s, time.monotonic())
        return answer

    async def _give_signs(self) -> None:
        while True:
            await self._call()
            await asyncio.sleep(_SIGN_OF_LIFE_S)

"""Limits of each key: requests and tokens per minute, counted for all gateways together by the state server (without
one, here alone), and open requests (open_requests.py).

A request waits for one answer of the state server where its key is limited at all, for another where its tokens are. Of
a gateway that cannot reach it the first requests wait until its lease is over (LEASE_S at most); then its own share of
the limits applies, and one that joined later, without a share, refuses them as unavailable.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence

from alignedserve.api.errors import QuotaExceeded, Unavailable
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import StorageError
from alignedserve.gateway.open_requests import OpenRequests
from alignedserve.gateway.shown_limits import ShownLimits, duration
from alignedserve.keys.entry import KeyEntry, Limit
from alignedserve.keys.quotas import LEASE_S, Charge, OwnShare, Taken, unused
from alignedserve.messages.state import QuotaAnswer, UseQuota
from alignedserve.process.background_tasks import start_background

_SIGN_OF_LIFE_S = LEASE_S / 5
_ANSWER_S = 0.5


class RequestQuotas:
    """Counts requests and tokens. Where there is a state server, between `start` and `stop`."""

    def __init__(
        self,
        requests_per_minute: int | None,
        *,
        gateway: str = "",
        gateways: Sequence[str] = (),
        client: StateClient | None = None,
        has_others: bool = True,
        is_first_process: bool = True,
    ) -> None:
        """`requests_per_minute`: of keys that have no limit of their own. `gateways`: that are there from the start,
        and have a share of every limit; none: this is the only one. `client`: None: there is no state server.
        `has_others`: beside it; alone it counts open ones by itself. `is_first_process`: it is the first of its name.
        """
        self._per_minute = requests_per_minute
        self._gateway = gateway
        self._client = client
        share = 1.0 if not gateways else (gateway in gateways) / len(gateways)
        self._has_share = share > 0.0
        now, process_id = time.monotonic(), secrets.token_hex(8)
        self._share = OwnShare(share, process_id, now, is_alone=client is None)
        if client is not None or not is_first_process:
            self._share.begin_used_up(now, is_first_process=is_first_process)
        if client is not None:
            client.on_new_link = lambda: self._share.on_new_link(time.monotonic())
        self._signs: asyncio.Task[None] | None = None
        self.open_requests = OpenRequests(gateway, gateways, process_id, client if has_others else None)

    def start(self) -> None:
        """Give signs of life, so that this gateway's share can be used by others."""
        if self._client is not None:
            self._signs = start_background(self._give_signs(), "the count of requests")
        self.open_requests.start()

    def stop(self) -> None:
        """Stop. May be repeated."""
        if self._signs is not None:
            self._signs.cancel()
        self.open_requests.stop()

    async def count(self, key: KeyEntry, shown: ShownLimits | None = None) -> None:
        """Count one request. Raises QuotaExceeded with the time until the next one is allowed, or Unavailable where it
        cannot be counted. `shown`: gets what is left."""
        per_minute, tokens = self._requests_of(key), key.tokens_per_minute
        charges: tuple[Charge, ...] = ()
        if per_minute:
            charges = (Charge(f"requests/{key.owner}", 1.0 / per_minute),)
        if tokens:
            charges += (Charge(_tokens(key), 0.0),)  # only to see what is left
        if not charges:
            return
        taken = await self._take(charges)
        if shown is not None and taken.owed:
            if per_minute:
                shown.show("requests", per_minute, taken.owed[0], taken.limit)
            if tokens:
                shown.show("tokens", tokens, taken.owed[-1], taken.limit)
        if taken.wait_s:
            assert per_minute, "a charge of nothing that was refused"
            raise _exceeded(key, Limit.REQUESTS, per_minute, taken.wait_s)

    async def count_tokens(self, key: KeyEntry, num_tokens: int, shown: ShownLimits | None = None) -> None:
        """Count the tokens that a request may have. Raises QuotaExceeded, Unavailable."""
        limit = key.tokens_per_minute
        if limit is None:
            return
        if num_tokens > limit:
            message = (
                f"Request too large for the key {key.name}: {Limit.TOKENS.value} is {limit}, "
                f"and its prompt and max_tokens are {num_tokens}."
            )
            raise QuotaExceeded(message, retry_after_s=None)
        charges = (Charge(_tokens(key), num_tokens / limit),)
        taken = await self._take(charges)
        if shown is not None and taken.owed:
            shown.show("tokens", limit, taken.owed[0], taken.limit)
        if taken.wait_s:
            raise _exceeded(key, Limit.TOKENS, limit, taken.wait_s, f" Requested {num_tokens}.")

    def give_back(self, key: KeyEntry, num_tokens: int, counted_s: float) -> None:
        """Give back tokens that were counted at this monotonic time and did not come. Does not wait."""
        limit = key.tokens_per_minute
        cost = 0.0 if limit is None else unused(num_tokens / limit, time.monotonic() - counted_s)
        if cost <= 0.0:
            return
        charges = (Charge(_tokens(key), -cost),)
        if self._share.seconds_leased(time.monotonic()) > 0.0:  # once: what is lost on the way stays counted
            start_background(self._give_back(charges), "tokens that did not come")
        elif self._has_share:
            self._share.take(charges, time.monotonic())

    async def _give_back(self, charges: tuple[Charge, ...]) -> None:
        await self._call(charges)

    def _requests_of(self, key: KeyEntry) -> int | None:
        return self._per_minute if key.requests_per_minute is None else key.requests_per_minute

    async def _take(self, charges: tuple[Charge, ...]) -> Taken:
        if self._client is None and self._has_share:
            return self._share.take(charges, time.monotonic())
        while (leased_s := self._share.seconds_leased(time.monotonic())) > 0.0:
            answer = await self._call(charges)
            if answer is None:
                await asyncio.sleep(min(leased_s, _SIGN_OF_LIFE_S))
            elif answer.is_member:
                return Taken(answer.wait_s, answer.owed, answer.limit)
        if not self._has_share:
            raise Unavailable("This gateway joined later, and cannot count requests without the head's state server.")
        return self._share.take(charges, time.monotonic())

    async def _call(self, charges: tuple[Charge, ...] = ()) -> QuotaAnswer | None:
        assert self._client is not None, "a count elsewhere without a state server"
        call = self._share.call(self._gateway, charges, time.monotonic())
        least, by_key = (None, {}) if call.spent is None else (call.spent.least, dict(call.spent.by_key))
        message = UseQuota(
            call.process_id, call.seen_s, least, by_key, tuple((charge.key, charge.cost) for charge in call.charges)
        )
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


def _tokens(key: KeyEntry) -> str:
    return f"tokens/{key.owner}"


def _exceeded(key: KeyEntry, limit: Limit, number: int, wait_s: float, more: str = "") -> QuotaExceeded:
    message = (
        f"Rate limit reached for the key {key.name} on {limit.value}: Limit {number}.{more} "
        f"Please try again in {duration(wait_s)}."
    )
    return QuotaExceeded(message, retry_after_s=wait_s)

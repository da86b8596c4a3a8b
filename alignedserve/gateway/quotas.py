"""Limits of each key: requests and tokens per minute, open requests, and what is left in headers of OpenAI's clients.

The state server counts for all gateways together; without one each counts alone. A request waits for one answer of the
server for each kind of limit that its key has. A gateway without an answer for LEASE_S counts alone, by its share; a
gateway that joined later has no share, and refuses as unavailable.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence

from alignedserve.api.errors import QuotaExceeded, Unavailable
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import StorageError
from alignedserve.keys.entry import KeyEntry, Limit
from alignedserve.keys.open_counts import OpenCounts, OpenStatement, Verdict, Wish
from alignedserve.keys.quotas import LEASE_S, Charge, OwnRequests, Taken, share_of_open, unused
from alignedserve.messages.state import OpenStated, QuotaAnswer, StateOpen, UseQuota
from alignedserve.process.background_tasks import start_background

_NAMES = ("limit", "remaining", "reset")
LIMIT_HEADERS = tuple(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in _NAMES)
_ROUNDING = 1e-6
_ASKED_AGAIN_S = LEASE_S / 10
_RETRY_S = 1.0  # of a client
_SIGN_OF_LIFE_S = LEASE_S / 5
_ANSWER_S = 0.5


class ShownLimits:
    """Collects what the headers of one response say."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, float, float]] = {}

    def show(self, what: str, limit: int, owed: float, may_owe: float) -> None:
        """Show a limit of which this part is owed, and that part may be."""
        self._shown[what] = (limit, owed, may_owe)

    def as_headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        for what, (limit, owed, may_owe) in self._shown.items():
            remaining = max(0, math.floor((may_owe - owed) * limit + _ROUNDING))
            reset_s = owed / may_owe * 60.0 if may_owe > 0.0 else 60.0
            values = (str(limit), str(min(limit, remaining)), duration(reset_s))
            named = zip(_NAMES, values, strict=True)
            headers += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in named]
        return headers


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000.0)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class OpenRequests:
    """Counts them. Where there is a state server, between `start` and `stop`."""

    def __init__(self, gateway: str, gateways: Sequence[str], process_id: str, client: StateClient | None) -> None:
        """`gateways`: each has a part of every limit; none: this is the only one. `client`: None: there is no server.
        `process_id`: of this process of the gateway.
        """
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
                raise _too_many_open(key, limit)
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
            raise _too_many_open(key, limit, "" if most == limit else f", of which this gateway has {most}")
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
            await asyncio.sleep(_SIGN_OF_LIFE_S)

    async def _state_ends(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            if self._counts.has_ended:
                await self._state(self._counts.ended())


def _too_many_open(key: KeyEntry, limit: int, more: str = "") -> QuotaExceeded:
    message = f"Rate limit reached for the key {key.name} on {Limit.OPEN.value}: Limit {limit}{more}."
    return QuotaExceeded(message, retry_after_s=_RETRY_S)


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
    ) -> None:
        """`requests_per_minute`: of keys without a limit. `gateways`: of the start, with a share of every limit; none:
        this is the only one. `client`: None: there is no state server. `has_others`: else open requests are counted
        here alone.
        """
        self._per_minute = requests_per_minute
        self._gateway = gateway
        self._client = client
        share = 1.0 if not gateways else (gateway in gateways) / len(gateways)
        self._has_share = share > 0.0
        self._own = OwnRequests(share, time.monotonic())
        if client is not None:
            client.on_new_link = self._own.on_new_link
        self._signs: asyncio.Task[None] | None = None
        self.open_requests = OpenRequests(gateway, gateways, secrets.token_hex(8), client if has_others else None)

    def start(self) -> None:
        """Look whether the state server answers, so that a request knows before it asks."""
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
        per_minute = self._per_minute if key.requests_per_minute is None else key.requests_per_minute
        tokens = key.tokens_per_minute
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
            raise _over_limit(key, Limit.REQUESTS, per_minute, taken.wait_s)

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
            raise _over_limit(key, Limit.TOKENS, limit, taken.wait_s, f" Requested {num_tokens}.")

    def give_back(self, key: KeyEntry, num_tokens: int, counted_s: float) -> None:
        """Give back tokens that were counted at this monotonic time and did not come. Does not wait."""
        limit = key.tokens_per_minute
        cost = 0.0 if limit is None else unused(num_tokens / limit, time.monotonic() - counted_s)
        if cost <= 0.0:
            return
        self._own.note((Charge(_tokens(key), -cost),), time.monotonic())
        if self._client is not None:
            start_background(self._give_back_shared(_tokens(key), cost), "tokens that did not come")

    async def _give_back_shared(self, key: str, cost: float) -> None:
        began_s = time.monotonic()
        while (left := unused(cost, time.monotonic() - began_s)) > 0.0:
            if self._own.seconds_leased(time.monotonic()) > 0.0:
                answer = await self._call((Charge(key, -left),), timeout_s=left * 60.0)
                if answer is None or answer.is_counted:  # where that is unknown, the tokens stay counted
                    return
            else:
                await asyncio.sleep(LEASE_S)

    async def _take(self, charges: tuple[Charge, ...]) -> Taken:
        while self._client is not None and self._own.seconds_leased(time.monotonic()) > 0.0:
            answer = await self._call(charges)
            if answer is None:  # it may have counted, as this gateway does now: not twice
                break
            if answer.is_counted:
                if not answer.wait_s:
                    self._own.note(charges, time.monotonic())
                return Taken(answer.wait_s, answer.owed)
        if not self._has_share:
            raise Unavailable("This gateway joined later, and cannot count requests without the head's state server.")
        return self._own.take(charges, time.monotonic())

    async def _call(self, charges: tuple[Charge, ...] = (), *, timeout_s: float | None = None) -> QuotaAnswer | None:
        """`timeout_s`: None: until this gateway counts alone."""
        assert self._client is not None, "a count elsewhere without a state server"
        now = time.monotonic()
        sent = tuple((charge.key, charge.cost, charge.owed) for charge in self._own.for_server(charges, now))
        timeout_s = timeout_s or self._own.seconds_leased(now) or _ANSWER_S
        try:
            answer = await self._client.call(UseQuota(self._own.seen_s, sent), QuotaAnswer, timeout_s)
        except StorageError:
            return None
        self._own.on_answer(answer.clock_s, time.monotonic())
        return answer

    async def _give_signs(self) -> None:
        while True:
            await self._call()
            await asyncio.sleep(_SIGN_OF_LIFE_S)


def _tokens(key: KeyEntry) -> str:
    return f"tokens/{key.owner}"


def _over_limit(key: KeyEntry, limit: Limit, number: int, wait_s: float, more: str = "") -> QuotaExceeded:
    message = (
        f"Rate limit reached for the key {key.name} on {limit.value}: Limit {number}.{more} "
        f"Please try again in {duration(wait_s)}."
    )
    return QuotaExceeded(message, retry_after_s=wait_s)

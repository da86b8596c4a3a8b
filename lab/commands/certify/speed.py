"""A short measurement of a server, by which the protocol is fitted to it: idle, full of chat, full of documents."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from alignedserve.client.openai_client import ClientFailureKind, CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.core import metrics
from alignedserve.core.errors import PeerError
from alignedserve.core.request import Slo
from lab.certification.protocol import Lengths, PlannedRequest, Speed, mean_request
from lab.commands.certify.calls import CallMaker

_NUM_IDLE = 4  # chats one after the other
_FIRST_IN_AIR, _MOST_IN_AIR = 8, 256
_GAIN = 1.1  # more in the air at a time are tried while they bring so much
_SETTLES = 0.3  # of a stage
_MOST_EMPTY = 20  # stages without a token: a slow server gets time for its first
_TIERS: tuple[Mapping[str, Any], ...] = (
    {"service_tier": "flex", "priority": 10},
    {"service_tier": "flex"},
    {"priority": 10},
    {},
)


class SpeedMeter:
    """Measures one server."""

    def __init__(self, client: OpenAiClient, calls: CallMaker, stage_s: float) -> None:
        self._client = client
        self.calls = calls  # with what was learnt
        self._stage_s = stage_s
        self.notes: list[str] = []
        self.tier: Mapping[str, Any] = {}
        self._documents_in_air = _FIRST_IN_AIR

    async def learn(self) -> None:
        """Find out what the server understands, and how many tokens a word has. Raises PeerError."""
        request = PlannedRequest("first", 100, 4)
        fixed = replace(self.calls, extra={"ignore_eos": True})
        outcome = await self._ask(fixed.call(request, Slo()))
        if _is_refused(outcome):
            self.notes.append(
                "The server refuses ignore_eos: answers are as long as the model makes them, and at most as planned."
            )
            fixed = self.calls
            outcome = await self._ask(fixed.call(request, Slo()))
        if outcome.failure is not None:
            raise PeerError(
                f"{self._client.url} does not answer a chat: {outcome.failure.label}, {outcome.failure.message}"
            )
        self.calls = fixed
        if outcome.num_prompt_tokens:
            self.calls = replace(fixed, tokens_per_word=max(outcome.num_prompt_tokens / 100, 0.5))
        else:
            self.notes.append("The server does not count tokens: a word is taken for one.")

    async def try_pictures(self, *wanted: Lengths) -> None:
        """Find out whether the server takes the pictures that requests are to carry. Raises PeerError."""
        edge = next((load.picture_edge for load in wanted if load.picture_share), None)
        if edge is None:
            return
        outcome = await self._ask(self.calls.call(PlannedRequest("picture", 16, 2, picture_edge=edge), Slo()))
        if outcome.failure is not None:
            reason = f"{outcome.failure.label}, {outcome.failure.message}"
            raise PeerError(f"{self._client.url} does not answer a chat with a picture: {reason}")

    async def choose_tier(self) -> None:
        for tier in _TIERS:
            outcome = await self._ask(self.calls.call(PlannedRequest("tier", 8, 2), Slo(), tier))
            if outcome.failure is None:
                self.tier = tier
                return

    async def measure(self, chat: Lengths, documents: Lengths, documents_in_air: int | None) -> Speed:
        """Measure. Raises PeerError. `documents_in_air`: at a time; None: as many as were best for chat."""
        idle = [await self._idle(chat, number) for number in range(_NUM_IDLE)]
        ttfts = sorted(filter(None, (metrics.ttft_s(chat.sent_s, chat.token_times_s) for chat in idle)))
        tpots = sorted(filter(None, (metrics.tpot_s(chat.token_times_s, chat.num_tokens) for chat in idle)))
        if not ttfts:
            raise PeerError(f"{self._client.url} answers without any text: nothing can be measured")
        chats_per_s, in_air = await self._fill_with_chats(chat)
        self._documents_in_air = documents_in_air or in_air
        documents_per_s = await self.documents_per_s(documents)
        return Speed(
            metrics.percentile(ttfts, 50), metrics.percentile(tpots or [0.001], 50), chats_per_s, documents_per_s
        )

    async def documents_per_s(self, documents: Lengths) -> float:
        """Measure how many of these documents a second the server ends when it is full of them. Raises PeerError."""
        loop = self._loop("fill documents", documents, self.tier)
        try:
            loop.grow_to(self._documents_in_air)
            return self._checked(await loop.rate_of_wave(self._stage_s), "fill documents", loop)
        finally:
            await loop.stop()

    async def _idle(self, chat: Lengths, number: int) -> CompletionOutcome:
        outcome = await self._ask(self.calls.call(mean_request(f"idle {number}", chat, number), Slo()))
        if outcome.failure is not None:
            raise PeerError(
                f"{self._client.url} fails a chat on its own: {outcome.failure.label}, {outcome.failure.message}"
            )
        return outcome

    async def _ask(self, call: CompletionCall) -> CompletionOutcome:
        return await self._client.complete(call, CompletionOutcome())

    def _loop(self, name: str, lengths: Lengths, more: Mapping[str, Any]) -> "_ClosedLoop":
        def call(number: int) -> CompletionCall:
            return self.calls.call(mean_request(f"{name} {number}", lengths, number), Slo(), more)

        return _ClosedLoop(self._client, call, lengths.output_len)

    async def _fill_with_chats(self, chat: Lengths) -> tuple[float, int]:
        """Return the most chats a second, and how many of them were in the air."""
        loop = self._loop("fill", chat, {})
        try:
            best, best_in_air, in_air = 0.0, _FIRST_IN_AIR, _FIRST_IN_AIR
            while True:
                loop.grow_to(in_air)
                rate = await self._rate(loop, self._stage_s)
                if rate <= best * _GAIN or loop.has_failed or in_air >= _MOST_IN_AIR:
                    return self._checked(max(best, rate), "fill", loop), best_in_air if rate <= best else in_air
                best, best_in_air, in_air = rate, in_air, in_air * 2
        finally:
            await loop.stop()

    async def _rate(self, loop: "_ClosedLoop", stage_s: float) -> float:
        for _ in range(_MOST_EMPTY):
            rate = await loop.rate(stage_s)
            if rate > 0 or loop.has_failed:
                return rate
        return 0.0

    def _checked(self, rate: float, name: str, loop: "_ClosedLoop") -> float:
        if rate <= 0:
            raise PeerError(
                f"{self._client.url} answered nothing while it was measured ({name}): "
                f"{loop.last_failure or 'no token came'}"
            )
        return rate


class _ClosedLoop:
    def __init__(self, client: OpenAiClient, call: Callable[[int], CompletionCall], output_len: int) -> None:
        self._client = client
        self._output_len = output_len
        self._call = call
        self._number = 0
        self._open: dict[int, CompletionOutcome] = {}
        self._ended: list[CompletionOutcome] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.last_failure = ""
        self.has_failed = False

    def grow_to(self, count: int) -> None:
        while len(self._tasks) < count:
            self._tasks.append(asyncio.create_task(self._keep_one()))

    async def rate(self, stage_s: float) -> float:
        """Return requests a second, by the tokens of a stage."""
        await asyncio.sleep(stage_s * _SETTLES)
        return await self._tokens_per_s(stage_s) / self._num_tokens_of_one()

    async def rate_of_wave(self, stage_s: float) -> float:
        """Return the rate at which all that began together would end: no part of it stands for the whole, as its
        prompts come first and its answers after them."""
        began_s = time.monotonic()
        for _ in range(_MOST_EMPTY):
            await asyncio.sleep(stage_s)
            if self.has_failed or len(self._ended) + sum(bool(chat.token_times_s) for chat in self._open.values()) >= (
                len(self._tasks)
            ):
                break
        prompts_s, num_early = time.monotonic() - began_s, self._num_tokens(began_s)
        tokens_per_s = await self._tokens_per_s(2 * stage_s)
        num_left = max(len(self._tasks) * self._num_tokens_of_one() - num_early, 0)
        return len(self._tasks) / (prompts_s + num_left / tokens_per_s) if tokens_per_s else 0.0

    async def _tokens_per_s(self, stage_s: float) -> float:
        began_s = time.monotonic()
        await asyncio.sleep(stage_s)
        return self._num_tokens(began_s) / (time.monotonic() - began_s)

    def _num_tokens(self, since_s: float) -> int:
        outcomes = [*self._ended, *self._open.values()]
        return sum(at_s >= since_s for outcome in outcomes for at_s in outcome.token_times_s)

    def _num_tokens_of_one(self) -> float:
        whole = [len(chat.token_times_s) for chat in self._ended if chat.failure is None and chat.token_times_s]
        return max(sum(whole) / len(whole) if whole else self._output_len, 1)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_one(self) -> None:
        while True:
            number, outcome = self._number, CompletionOutcome()
            self._number += 1
            self._open[number] = outcome
            await self._client.complete(self._call(number), outcome)
            self._ended.append(self._open.pop(number))
            if outcome.failure is not None:
                self.has_failed, self.last_failure = True, f"{outcome.failure.label}, {outcome.failure.message}"
                await asyncio.sleep(0.2)  # a server that refuses is not asked in a tight loop


def _is_refused(outcome: CompletionOutcome) -> bool:
    failure = outcome.failure
    return failure is not None and failure.kind is ClientFailureKind.HTTP and failure.status in (400, 422)

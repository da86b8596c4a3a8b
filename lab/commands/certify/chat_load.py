"""Chat in bursts: an open loop, which a slow server does not slow down."""

import asyncio
import time
from collections.abc import Sequence

from alignedserve.client.openai_client import ClientFailureKind, CompletionOutcome, OpenAiClient
from alignedserve.core.errors import PeerLost
from alignedserve.core.request import Slo
from lab.certification.protocol import PlannedRequest
from lab.commands.certify.calls import CallMaker
from lab.loadgen.load_generator import LoadGenerator, SentRequest
from lab.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass

_GONE_AFTER = 8  # chats in a row that found no connection


class ChatLoad:
    """The chat of one phase. What was sent is kept also when it is cancelled."""

    def __init__(
        self, *, client: OpenAiClient, calls: CallMaker, slo: Slo, chats: Sequence[PlannedRequest], patience_s: float
    ) -> None:
        """`patience_s`: in which some chat must go on while any is open."""
        self._client = client
        self._patience_s = patience_s
        self._chats = chats
        self._calls = [calls.call(chat, slo) for chat in chats]  # takes time, so not between arrivals
        self._slo = slo
        self._num_open = self._num_gone = 0
        self._is_gone = asyncio.Event()
        self.began_s = 0.0  # on the monotonic clock
        self.outcomes: list[CompletionOutcome] = []
        self.pictured: list[bool] = []  # of these, which carried a picture
        self.late_s: list[float] = []  # our own lateness: of sending, and of the event loop that reads

    async def run(self, lasts_s: float) -> None:
        """Send every chat in time and wait for all answers, at least for `lasts_s`.

        Raises PeerLost when the server is gone, or silent for longer than patience lasts.
        """
        self.began_s = time.monotonic()
        requests = tuple(
            LoadRequest(index, "chat", chat.arrival_s, chat.prompt_len, chat.output_len)
            for index, chat in enumerate(self._chats)
        )
        plan = LoadPlan((TrafficClass("chat", self._slo),), requests)
        generator = LoadGenerator(plan=plan, send=self._send, on_done=self._note)
        sending = asyncio.create_task(generator.run())
        gone = asyncio.create_task(self._is_gone.wait())
        silent = asyncio.create_task(self._silence())
        try:
            await asyncio.wait((sending, gone, silent), return_when=asyncio.FIRST_COMPLETED)
            if silent.done():
                await silent
                raise PeerLost(f"no chat went on for {self._patience_s:g} s (--patience)")
            if self._is_gone.is_set():
                raise PeerLost(f"nothing answers at {self._client.url} any more")
            self.late_s += (await sending).loop_lags_s
            await asyncio.sleep(max(0.0, self.began_s + lasts_s - time.monotonic()))
        finally:
            sending.cancel()
            gone.cancel()
            silent.cancel()
            await asyncio.gather(sending, gone, silent, return_exceptions=True)

    async def _silence(self) -> None:
        silent_s = 0.0
        while silent_s < self._patience_s:
            await asyncio.sleep(min(1.0, max(self._patience_s - silent_s, 0.01)))
            last_s = max(
                [self.began_s, *(max([outcome.ended_s, *outcome.token_times_s[-1:]]) for outcome in self.outcomes)]
            )
            silent_s = time.monotonic() - last_s if self._num_open else 0.0

    async def _send(self, request: LoadRequest, outcome: CompletionOutcome) -> None:
        self.outcomes.append(outcome)
        self.pictured.append(self._chats[request.index].picture_edge is not None)
        self._num_open += 1
        try:
            await self._client.complete(self._calls[request.index], outcome)
        finally:
            self._num_open -= 1

    def _note(self, sent: SentRequest) -> None:
        self.late_s.append(sent.lateness_s)
        failure = sent.outcome.failure
        is_gone = failure is not None and failure.kind is ClientFailureKind.CONNECT
        self._num_gone = self._num_gone + 1 if is_gone else 0
        if self._num_gone >= _GONE_AFTER:
            self._is_gone.set()

"""Documents as streams, for a server without batches: a number of them in the air, the shortest window first."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from alignedserve.client.openai_client import ClientFailureKind, CompletionOutcome, OpenAiClient
from alignedserve.core.request import Slo
from lab.certification.judged_lines import LineAnswer, LineJudge
from lab.certification.protocol import PlannedBatch, PlannedLine
from lab.commands.certify.calls import CallMaker
from lab.commands.certify.documents import Documents, DocumentsLog

_LATER = frozenset({429, 503})
_PAUSE_S, _LOOK_S = 1.0, 0.5


class _OpenBatch:
    def __init__(self, plan: PlannedBatch, expected: Mapping[int, str]) -> None:
        self.plan = plan
        self.judge = LineJudge(plan, expected)
        self.num_left = len(plan.lines)
        self.ended_s: float | None = None

    def take(self, answer: LineAnswer) -> None:
        self.judge.take(answer)
        self.num_left -= 1
        if not self.num_left:
            self.ended_s = time.monotonic()


class StreamDocuments(Documents):
    """Sends documents as streams."""

    def __init__(
        self, *, client: OpenAiClient, calls: CallMaker, tier: Mapping[str, Any], outstanding: int, patience_s: float
    ) -> None:
        self._client = client
        self._calls = calls
        self._tier = tier
        self._outstanding = outstanding
        self._patience_s = patience_s
        fields = " and ".join(f"{name}: {value}" for name, value in tier.items())
        self.words = f"streams, {outstanding} at a time, with {fields or 'nothing that tells them from chat'}"

    @override
    async def run(self, batches: Sequence[PlannedBatch], expected: Mapping[int, str], log: DocumentsLog) -> None:
        log.begin()
        opened = [_OpenBatch(plan, expected) for plan in batches]
        waiting = deque((batch, line) for batch in sorted(opened, key=_window) for line in batch.plan.lines)
        tasks = [asyncio.create_task(self._send_all(waiting, log)) for _ in range(self._outstanding)]
        log.has_begun.set()
        try:
            while not all(task.done() for task in tasks):
                log.step(sum(len(batch.plan.lines) - batch.num_left for batch in opened))
                log.require_progress(self._patience_s)
                await asyncio.wait(tasks, timeout=_LOOK_S)
            await asyncio.gather(*tasks)
            log.step(sum(len(batch.plan.lines) for batch in opened))
            log.ended_s = max(batch.ended_s or log.began_s for batch in opened)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for batch in opened:
                status = "completed" if batch.ended_s is not None else "in_progress"
                log.batches.append(batch.judge.record(status, log.began_s, batch.ended_s))

    async def _send_all(self, waiting: deque[tuple[_OpenBatch, PlannedLine]], log: DocumentsLog) -> None:
        while waiting:
            batch, line = waiting.popleft()
            outcome = await self._answered(line)
            log.streams.append(outcome)
            failure = None if outcome.failure is None else outcome.failure.label
            batch.take(
                LineAnswer(line.custom_id, outcome.text, outcome.num_prompt_tokens or 0, outcome.num_tokens, failure)
            )

    async def _answered(self, line: PlannedLine) -> CompletionOutcome:
        began_s = time.monotonic()
        while True:
            outcome = await self._client.complete(
                self._calls.call(line.request, Slo(), self._tier), CompletionOutcome()
            )
            failure = outcome.failure
            is_later = failure is not None and failure.kind is ClientFailureKind.HTTP and failure.status in _LATER
            if not is_later or time.monotonic() - began_s > self._patience_s:
                return outcome
            await asyncio.sleep(_PAUSE_S)


def _window(batch: _OpenBatch) -> float:
    return batch.plan.window_s

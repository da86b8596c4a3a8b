"""The protocol against a running server: measures it, runs the three phases, keeps what was seen when one fails."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from typing_extensions import override

from alignedserve.cli.batch.client import BatchClient, RequestRefused, ServerUnavailable
from alignedserve.client.openai_client import ClientFailureKind, CompletionApi, CompletionOutcome, OpenAiClient
from alignedserve.core import metrics
from alignedserve.core.errors import PeerError, PeerLost
from alignedserve.core.request import Slo
from lab.certification.judged_lines import LineAnswer, LineJudge
from lab.certification.protocol import Fitting, Phase, PlannedBatch, PlannedLine, Protocol, Speed, Wanted
from lab.certification.records import BatchRecord, Evidence, PhaseRecord
from lab.commands.certify.batch_documents import BatchDocuments, NoBatches
from lab.commands.certify.calls import CallMaker, gaps_of, record_of
from lab.commands.certify.chat_load import ChatLoad
from lab.commands.certify.documents import Documents, DocumentsLog
from lab.commands.certify.speed import SpeedMeter

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


_BEGINS_S = 30.0  # that batches may be checked before chat comes all the same
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What a run against a server needs beyond the protocol."""

    url: str
    api_key: str | None
    model: str | None
    api: CompletionApi
    outstanding: int
    streams: bool
    patience_s: float
    stage_s: float  # of measuring
    settles_s: float = 1.0  # between phases
    lost_patience_s: float = 20.0  # a server that answers no more is given up after


class Measured(NamedTuple):
    """What came of a run; without a protocol nothing could be measured."""

    protocol: Protocol
    speed: Speed
    evidence: Evidence
    model: str
    documents: str  # how they were sent


class LiveRun:
    """One certificate's run against one server."""

    def __init__(self, options: LiveOptions, wanted: Wanted, say: Say) -> None:
        self._options = options
        self._wanted = wanted
        self._say = say
        self._client = OpenAiClient(url=options.url, api_key=options.api_key, timeout_s=24 * 3600.0)
        self._batches = BatchClient(
            url=options.url, api_key=options.api_key, say=lambda words: None, patience_s=options.lost_patience_s
        )
        self._notes: list[str] = []

    async def run(self) -> Measured:
        """Run everything. Raises PeerError where the server cannot even be measured."""
        async with self._client, self._batches:
            model = await self._model()
            meter = SpeedMeter(self._client, CallMaker(model, self._options.api), self._options.stage_s)
            await meter.learn()
            await meter.try_pictures(self._wanted.chat, self._wanted.documents)
            has_batches = not self._options.streams and await self._has_batches()
            await meter.choose_tier()
            self._say("measuring the server, by which the protocol is fitted to it")
            outstanding = None if has_batches else self._options.outstanding
            measured = await meter.measure(self._wanted.chat, self._wanted.documents, outstanding)
            fitting = Fitting(self._wanted, measured)
            while (documents := fitting.next_documents()) is not None:
                fitting.measured(await meter.documents_per_s(documents))
            protocol, speed = fitting.protocol, fitting.speed
            self._notes += meter.notes
            runner = _PhaseRunner(self._client, meter.calls, protocol, self._say, self._options.patience_s)
            streams = StreamDocuments(
                client=self._client, calls=meter.calls, tier=meter.tier, outstanding=self._options.outstanding,
                patience_s=self._options.patience_s,
            )  # fmt: skip
            poll_s = min(5.0, max(0.05, protocol.chat_s / 200))
            batches = BatchDocuments(
                client=self._batches, calls=meter.calls, poll_s=poll_s, patience_s=self._options.patience_s
            )
            runner.documents = batches if has_batches else streams
            phases = await self._phases(runner, streams)
            evidence = Evidence(phases, speed.chats_per_s, tuple(dict.fromkeys([*self._notes, *runner.notes])))
            return Measured(protocol, speed, evidence, model, runner.documents.words)

    async def _model(self) -> str:
        listed = await self._client.listed_models()
        names = [model.name for model in listed]
        wanted = self._options.model
        if wanted is not None and wanted not in names:
            raise PeerError(f"{self._client.url} does not serve {wanted!r}; it serves {', '.join(names)}")
        return wanted or names[0]

    async def _has_batches(self) -> bool:
        try:
            await self._batches.batches(1)
        except (RequestRefused, ServerUnavailable, PeerError, KeyError, TypeError) as error:
            self._notes.append(f"The server has no batches ({error}): documents were streamed instead.")
            return False
        return True

    async def _phases(self, runner: "_PhaseRunner", streams: Documents) -> tuple[PhaseRecord, ...]:
        records: list[PhaseRecord] = []
        for number, phase in enumerate(Phase, start=1):
            self._say(f"phase {number} of {len(Phase)}: {phase.value}")
            try:
                record = await runner.run(phase)
            except NoBatches as error:
                self._notes.append(f"The server takes no batches ({error}): documents were streamed instead.")
                runner.documents = streams
                record = await runner.run(phase)
            records.append(record)
            if record.failure is not None:
                self._say(f"{phase.value}: {record.failure}")
                break
            await asyncio.sleep(self._options.settles_s)
        return tuple(records)


class _PhaseRunner:
    documents: Documents

    def __init__(self, client: OpenAiClient, calls: CallMaker, protocol: Protocol, say: Say, patience_s: float) -> None:
        self._client = client
        self._calls = calls
        self._patience_s = patience_s
        self._protocol = protocol
        self._say = say
        self._expected: Mapping[int, str] | None = None
        self.notes: list[str] = []

    async def run(self, phase: Phase) -> PhaseRecord:
        began_s, log, failure, missing = time.monotonic(), DocumentsLog(), None, None
        chats = self._protocol.chats(phase) if phase.has_chat else ()
        chat = ChatLoad(
            client=self._client, calls=self._calls, slo=self._protocol.slo, chats=chats, patience_s=self._patience_s
        )
        try:
            expected = await self._answers_alone() if phase.has_documents else {}
            async with asyncio.TaskGroup() as group:
                if phase.has_documents:
                    group.create_task(self.documents.run(self._protocol.batches(phase), expected, log))
                if phase.has_chat:
                    group.create_task(self._chat(chat, log, waits=phase.has_documents))
        except* NoBatches as error:
            missing = _first(error)  # raised here, Python 3.11.2 would put it into a group
        except* PeerError as error:
            failure = str(_first(error))
        if missing is not None:
            raise missing
        self.notes += log.notes
        return _record_of(phase, chat, log, began_s, failure)

    async def _chat(self, chat: ChatLoad, log: DocumentsLog, *, waits: bool) -> None:
        if waits:
            try:
                async with asyncio.timeout(_BEGINS_S):
                    await log.has_begun.wait()
            except TimeoutError:
                log.notes.append(f"No batch had begun after {_BEGINS_S:g} s; chat came all the same.")
        await chat.run(self._protocol.chat_s)

    async def _answers_alone(self) -> Mapping[int, str]:
        if self._expected is None:
            answers = {}
            for number, probe in enumerate(self._protocol.probes()):
                outcome = await self._client.complete(
                    self._calls.call(probe, replace(self._protocol.slo, ttft_s=None, tpot_s=None)), CompletionOutcome()
                )
                if outcome.failure is not None:
                    raise PeerLost(f"a document alone was not answered: {outcome.failure.message}")
                answers[number] = outcome.text
            self._expected = answers
        return self._expected


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    exception = group.exceptions[0]
    return _first(exception) if isinstance(exception, BaseExceptionGroup) else exception


def _record_of(phase: Phase, chat: ChatLoad, log: DocumentsLog, began_s: float, failure: str | None) -> PhaseRecord:
    zero_s = chat.began_s or log.began_s or began_s
    record = PhaseRecord(
        phase=phase,
        duration_s=time.monotonic() - began_s,
        chats=tuple(
            record_of(outcome, zero_s, has_picture=is_pictured)
            for outcome, is_pictured in zip(chat.outcomes, chat.pictured, strict=True)
        ),
        batches=tuple(_since(batch, zero_s) for batch in log.batches),
        documents=tuple(record_of(outcome, zero_s) for outcome in log.streams),
        document_gaps_s=gaps_of(log.streams),
        documents_began_s=log.began_s - zero_s if phase.has_documents else 0.0,
        documents_ended_s=None if log.ended_s is None else log.ended_s - zero_s,
        client_late_s=None if (late := metrics.describe(chat.late_s)) is None else late.p99,
        progress=tuple((at_s - zero_s, count) for at_s, count in log.progress),
        failure=failure,
    )
    until_s = zero_s + record.beside_until_s
    return replace(record, gaps_s=gaps_of(outcome for outcome in chat.outcomes if outcome.sent_s < until_s))


def _since(batch: BatchRecord, zero_s: float) -> BatchRecord:
    ended_s = None if batch.ended_s is None else batch.ended_s - zero_s
    return replace(batch, began_s=batch.began_s - zero_s, ended_s=ended_s)

"""The load generator: sends a plan on time, whatever the server does.

Open-loop requests go out at their planned moment; a slow answer never delays the next request. The generator watches
itself: how late each request went out, and how late its own event loop woke up (a late loop also reads tokens late).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from alignedserve.client.openai_client import CompletionOutcome
from lab.loadgen.load_plan import LoadPlan, LoadRequest, PlannedLoop, TrafficClass

LAG_SAMPLE_S = 0.02

Send = Callable[[LoadRequest, CompletionOutcome], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request as planned and as it went. Times count from the start of the run."""

    request: LoadRequest
    outcome: CompletionOutcome
    lateness_s: float  # sent after its planned moment; 0 in a closed loop


@dataclass(slots=True)
class LoadRun:
    """Requests and timing of a whole run, of which what comes before `warm_up_s` of it does not count."""

    started_s: float = 0.0
    ended_s: float = 0.0
    sent: list[SentRequest] = field(default_factory=list)  # in order of sending
    cut_off: list[SentRequest] = field(default_factory=list)  # given up at the end: only their tokens count
    cut_off_s: float | None = None  # in the run, when closed loops were; None: they were waited for
    warm_up_s: float = 0.0
    loop_lags_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # processor time that the generator itself took
    was_interrupted: bool = False  # before the plan's end

    @property
    def duration_s(self) -> float:
        """Return the seconds from the end of warming up to the last answer."""
        return self.ended_s - self.started_s - self.warm_up_s

    def duration_of(self, traffic: TrafficClass) -> float:
        """Return the seconds in which this class had requests out, after warming up.

        A closed loop that is cut off gets nothing while the answers to others are waited for.
        """
        if traffic.outstanding is None or self.cut_off_s is None:
            return self.duration_s
        return self.cut_off_s - self.warm_up_s

    @property
    def counted(self) -> list[SentRequest]:
        """Return the requests that were sent after warming up and not cut off."""
        if not self.warm_up_s:
            return self.sent
        return [sent for sent in self.sent if sent.outcome.sent_s >= self.started_s + self.warm_up_s]

    def num_tokens_of(self, class_name: str | None) -> int:
        """Return the output tokens that came after warming up, of requests of this class; None: of all.

        Of requests that warmed up or were cut off too: what a server gives in a time is not what it began in it.
        """
        began_s = self.started_s + self.warm_up_s
        return sum(
            sent.outcome.num_tokens_since(began_s)
            for sent in (*self.sent, *self.cut_off)
            if class_name is None or sent.request.class_name == class_name
        )


class LoadGenerator:
    """Generator of the load of one plan, for one run."""

    def __init__(
        self,
        *,
        plan: LoadPlan,
        send: Send,
        on_done: Callable[[SentRequest], None] | None = None,
        cuts_off: bool = False,
        warm_up_s: float = 0.0,
    ) -> None:
        """`cuts_off`: closed-loop requests still in the air at the plan's end are given up; their tokens count."""
        self._plan = plan
        self._cuts_off = cuts_off
        self._send = send
        self._on_done = on_done
        self._run = LoadRun(warm_up_s=warm_up_s, cut_off_s=plan.ends_s if cuts_off else None)
        self._opens_done = asyncio.Event()
        self._num_closed = 0

    async def run(self) -> LoadRun:
        """Send everything and wait for every answer; cancelled, give up what is in the air (`interrupted`)."""
        run = self._run
        run.started_s, cpu_before_s = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._watch_loop())
        try:
            async with asyncio.TaskGroup() as group:
                for loop in self._plan.closed_loops:
                    for _ in range(loop.traffic.outstanding or 0):
                        group.create_task(self._keep_one_in_the_air(loop))
                await self._send_on_time(group)
        finally:
            watch.cancel()
            run.ended_s, run.cpu_s = time.monotonic(), time.process_time() - cpu_before_s
        return run

    def interrupted(self) -> LoadRun:
        """Return the part of a cancelled run."""
        self._run.was_interrupted = True
        return self._run

    async def _send_on_time(self, group: asyncio.TaskGroup) -> None:
        for request in self._plan.open_requests:
            due_s = self._run.started_s + request.arrival_s
            # Sleeping 0 s when late still lets tokens be read.
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(self._perform(request, due_s))
        self._opens_done.set()

    async def _keep_one_in_the_air(self, loop: PlannedLoop) -> None:
        while self._may_start_closed():
            self._num_closed += 1
            try:
                async with asyncio.timeout(self._left_s() if self._cuts_off else None):
                    sent = await self._perform(next(loop.requests), None)
            except TimeoutError:
                return
            if sent.outcome.failure is not None:
                await asyncio.sleep(0.1)  # a server that refuses at once must not be asked in a tight loop

    def _may_start_closed(self) -> bool:
        plan = self._plan
        if plan.max_closed is not None and self._num_closed >= plan.max_closed:
            return False
        left_s = self._left_s()
        if left_s is not None:
            return left_s > 0
        return plan.max_closed is not None or not self._opens_done.is_set()

    def _left_s(self) -> float | None:
        ends_s = self._plan.ends_s
        return None if ends_s is None else self._run.started_s + ends_s - time.monotonic()

    async def _perform(self, request: LoadRequest, due_s: float | None) -> SentRequest:
        outcome = CompletionOutcome()
        lateness_s = 0.0 if due_s is None else max(0.0, time.monotonic() - due_s)
        sent = SentRequest(request, outcome, lateness_s)
        self._run.sent.append(sent)
        try:
            await self._send(request, outcome)
        except asyncio.CancelledError:
            self._run.sent.remove(sent)
            self._run.cut_off.append(sent)
            raise
        if self._on_done is not None:
            self._on_done(sent)
        return sent

    async def _watch_loop(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_SAMPLE_S)
            self._run.loop_lags_s.append(max(0.0, time.monotonic() - before - LAG_SAMPLE_S))

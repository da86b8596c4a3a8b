"""The iteration in flight on a worker, and what follows from its end: the same for prompts and for decodes."""

from collections.abc import Callable, Collection, Iterable
from typing import Generic, Protocol, TypeVar

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.messages.events import SendTo
from alignedserve.messages.gateways import PromptScored, TokensEmitted
from alignedserve.messages.iterations import IterationCompleted, joined
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.part import Commands, WorkerCommand
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.router_link import RouterLink

RequestT = TypeVar("RequestT", bound=WorkerRequest)
RequestT_co = TypeVar("RequestT_co", bound=WorkerRequest, covariant=True)

_NO_LOGITS = (FailureKind.INTERNAL, "the model gave no usable logits")


class _Requests(Protocol[RequestT_co]):
    def __getitem__(self, request_id: RequestId, /) -> RequestT_co: ...


class IterationCycle(Generic[RequestT]):
    """Starts and ends one iteration at a time, and urgent ones within it.

    A phase differs in two functions: `release` drops a request that has ended, `proceed` takes one on that has sampled
    a token and continues. Both return the commands that this takes. A worker that changes its role changes `proceed`.
    """

    def __init__(
        self,
        *,
        router: RouterLink,
        eos_token_ids: frozenset[int],
        release: Callable[[RequestT], Commands],
        proceed: Callable[[RequestT], Commands] | None = None,
        iteration_log: IterationLog | None = None,
    ) -> None:
        self._router = router
        self._eos_token_ids = eos_token_ids
        self._release = release
        self._proceed = proceed
        self._iteration_log = iteration_log
        self._started: list[tuple[float, bool]] = []  # of those in flight, and whether it is logged; an urgent one last

    @property
    def is_running(self) -> bool:
        return bool(self._started)

    def start(
        self,
        now: float,
        members: Collection[RequestT],
        *,
        has_changed: bool,
        is_switching: bool = False,
        alone_s: float = 0.0,
    ) -> None:
        """Begin an iteration of these requests; `has_changed`: others than in the last. `alone_s`: of its real-time
        part.

        An iteration without requests only copies, and is not logged. One that begins while another is in flight is
        urgent, and ends before it.
        """
        is_logged = self._iteration_log is not None and bool(members)
        self._started.append((now, is_logged))
        if self._iteration_log is not None and is_logged:
            self._iteration_log.iteration_started(
                now, members, has_changed=has_changed, is_switching=is_switching, alone_s=alone_s
            )

    def end(self, event: IterationCompleted, now: float) -> float:
        assert self._started, "an iteration ended that was not started"
        started_s, is_logged = self._started.pop()
        if self._iteration_log is not None and is_logged:
            self._iteration_log.iteration_completed(now, event)
        return event.duration_s(started_s, now)

    def outcome(self, event: IterationCompleted, requests: _Requests[RequestT]) -> list[WorkerCommand]:
        """Add the sampled tokens to their requests; return the messages: prompt scores first, reports to the router
        last."""
        commands: list[WorkerCommand] = []
        scored = [
            SendTo(
                requests[scores.request_id].request.reply_to,
                PromptScored(scores.request_id, scores.first_position, scores.entries),
            )
            for scores in event.prompt_scores
        ]
        eos_token_ids, proceed = self._eos_token_ids, self._proceed
        sampled = [
            (running.request.reply_to, running, running.append(token, eos_token_ids))
            for token in event.sampled
            if not (running := requests[token.request_id]).is_aborted
        ]
        for _, running, delta in sampled:
            if not running.is_prefilled:
                running.is_prefilled = True
                commands += self._router.prefilled(running)
            if delta.finish_reason is not None:
                commands += self._release(running)
                commands += self._router.finished(running)
            elif proceed is not None:
                commands += proceed(running)
        reasons = dict(event.reasons)
        for request_id in event.failed:
            running = requests[request_id]
            commands += self._release(running)
            commands += self._router.failed(running, *reasons.get(request_id, _NO_LOGITS))
        emitted: list[SendTo] = []
        for address in dict.fromkeys([gateway for gateway, _, _ in sampled]):  # few: a pass each is cheaper
            deltas = [delta for gateway, _, delta in sampled if gateway == address]
            emitted += [SendTo(address, TokensEmitted(tuple(joined(deltas) if event.forced else deltas)))]
        return [*scored, *emitted, *commands]


class UrgentCycle:
    """What has come during the pass in flight, whether an urgent iteration runs, and the end of the pass that waits.

    One urgent iteration at a time. A pass that ends before it could stop is dealt with after the urgent one.
    """

    def __init__(self) -> None:
        self._came: dict[RequestId, None] = {}  # and have no token yet
        self._has_news = False  # since they were last asked for
        self._is_running = False
        self._kept: IterationCompleted | None = None

    @property
    def may_begin(self) -> bool:
        return self._has_news and not self._is_running

    def came(self, request_id: RequestId) -> None:
        self._came[request_id] = None
        self._has_news = True

    def pass_began(self) -> None:
        self._came.clear()
        self._has_news = False

    def ask(self) -> list[RequestId]:
        """Return, in order, the requests of which an urgent iteration may be made now."""
        self._has_news = False
        return list(self._came)

    def keep(self, request_ids: Iterable[RequestId]) -> None:
        self._came = dict.fromkeys(request_ids)

    def began(self) -> None:
        assert not self._is_running, "two urgent iterations at once"
        self._is_running = True

    def keeps(self, event: IterationCompleted) -> bool:
        """Keep the end of the pass until that of the urgent iteration; return whether it did."""
        if event.is_urgent or not self._is_running:
            return False
        self._kept = event
        return True

    def end(self) -> IterationCompleted | None:
        """Note the end of the urgent iteration; return the end of the pass, if it was kept."""
        assert self._is_running, "an urgent iteration ended that was not begun"
        self._is_running, self._has_news = False, bool(self._came)
        ended_pass, self._kept = self._kept, None
        return ended_pass

"""The iteration in flight on a worker, and what follows from its end: the same for prompts and for decodes."""

from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from alignedserve.core.ids import RequestId
from alignedserve.messages.events import Send, SendTo
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import PromptScored, TokensEmitted
from alignedserve.messages.iterations import IterationCompleted, joined
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.router_link import RouterLink

RequestT = TypeVar("RequestT", bound=WorkerRequest)
RequestT_co = TypeVar("RequestT_co", bound=WorkerRequest, covariant=True)
CommandT = TypeVar("CommandT")


class _Requests(Protocol[RequestT_co]):
    def __getitem__(self, request_id: RequestId, /) -> RequestT_co: ...


class IterationCycle(Generic[RequestT, CommandT]):
    """Starts and ends one iteration at a time, and urgent ones within it.

    A phase differs in two functions: `release` drops a request that has ended, `proceed` takes one on that has sampled
    a token and continues. Both return the commands that this takes. A worker that changes its role changes `proceed`.
    """

    def __init__(
        self,
        *,
        router: RouterLink,
        eos_token_ids: frozenset[int],
        release: Callable[[RequestT], Sequence[CommandT]],
        proceed: Callable[[RequestT], Sequence[CommandT]] | None = None,
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
        """True while an iteration is in flight."""
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
        """Begin an iteration of these requests; `has_changed`: others than in the last one. `alone_s`: of its real-time
        part, as in the plan.

        One without requests makes copies alone, and is not in the log. One that begins while another is in flight is
        urgent, and ends before it.
        """
        is_logged = self._iteration_log is not None and bool(members)
        self._started.append((now, is_logged))
        if self._iteration_log is not None and is_logged:
            self._iteration_log.iteration_started(
                now, members, has_changed=has_changed, is_switching=is_switching, alone_s=alone_s
            )

    def end(self, event: IterationCompleted, now: float) -> float:
        """End the iteration that began last and return the seconds that it took."""
        assert self._started, "an iteration ended that was not started"
        started_s, is_logged = self._started.pop()
        if self._iteration_log is not None and is_logged:
            self._iteration_log.iteration_completed(now, event)
        return event.duration_s(started_s, now)

    def outcome(self, event: IterationCompleted, requests: _Requests[RequestT]) -> list[CommandT | Send | SendTo]:
        """Add the sampled tokens to their requests; return the messages to gateways and router.

        Scores of a prompt go before its token, reports to the router last: no client waits for them.
        """
        commands: list[CommandT | Send | SendTo] = []
        scored = [
            SendTo(
                requests[scores.request_id].request.reply_to,
                PromptScored(scores.request_id, scores.first_position, scores.entries),
            )
            for scores in event.prompt_scores
        ]
        eos_token_ids, proceed = self._eos_token_ids, self._proceed
        told = [
            (running.request.reply_to, running, running.append(token, eos_token_ids))
            for token in event.sampled
            if not (running := requests[token.request_id]).is_aborted
        ]
        for _, running, delta in told:
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
            commands += self._router.failed(running, *_failure(reasons.get(request_id)))
        emitted: list[SendTo] = []
        for address in dict.fromkeys([gateway for gateway, _, _ in told]):  # few: a pass for each costs less than lists
            own = [delta for gateway, _, delta in told if gateway == address]
            emitted += [SendTo(address, TokensEmitted(tuple(joined(own) if event.forced else own)))]
        return [*scored, *emitted, *commands]


def _failure(reason: str | None) -> tuple[FailureKind, str]:
    if reason is None:
        return FailureKind.INTERNAL, "the model gave no usable logits"
    return FailureKind.UNSERVABLE, reason

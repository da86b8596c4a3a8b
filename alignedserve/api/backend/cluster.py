"""The backend of one deployment of a running cluster: requests go to its router, tokens come straight from the workers.

The life of a request here: 1. `submit` sends it to the router. 2. Workers send deltas; they are put in order by
`first_index`, repeats are dropped, and tokens behind a gap are held until the gap is filled. 3. It leaves the table
with its last token, by `abort`, or by failing: rejected or failed by the router, or silence past its deadline, which
one task watches for all requests. While the router is lost, requests with tokens go on, as workers need no router, and
those without wait for the next one, as do those that come meanwhile.
Only the gateway knows which tokens the client has: when the router reports that a request was interrupted, or connects
again after a loss, the gateway sends it the position to resume from."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat

from alignedserve.api.backend.connection import ClusterConnection
from alignedserve.api.backend.interface import RequestStream, missing_peer
from alignedserve.api.errors import (
    GenerationError,
    GenerationFailed,
    GrammarFailed,
    Overloaded,
    ResourceUnavailable,
    TimedOut,
    Unavailable,
    Unservable,
)
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, RequestClass, TokenLogprob
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    GatewayRegistered,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokenDelta,
    TokensEmitted,
)
from alignedserve.messages.request_notes import Step
from alignedserve.messages.wire import Message
from alignedserve.process.addresses import ROUTER
from alignedserve.process.background_tasks import start_background
from alignedserve.process.links import Peer

# A request that is silent for this long is sent to the router again, which ignores it if all is well: no request waits
# for ever, whichever message was lost.
_RESEND_AFTER_S = 10.0
_MOST_RESEND_AFTER_S = 160.0  # of best effort, where the time doubles: thousands may wait for an hour
_RESEND_SOON_S = 2.0  # while tokens are missing before others, or were lost: what is under way elsewhere comes sooner
_TOKEN_BYTES = 16  # that are copied while a token is encoded


class UnfinishedRequest:
    """A request before its end, and its tokens in order."""

    def __init__(self, request: Request, stream: RequestStream, now: float) -> None:
        self.is_sent = False  # to a router
        self.is_to_be_sent = False  # again, without a further wait
        self.stream = stream
        self.last_heard_s = now  # when new tokens last came
        self.last_worker: str | None = None  # whose tokens came last, until its link is lost
        self._last_sent_s = now
        self._resend_after_s = _RESEND_AFTER_S
        self._is_asked_soon = False  # a chat whose worker was lost: it is sent again soon
        self._last_early_s = now  # when tokens behind a gap last came
        self._gap_told_s: float | None = None  # when it was sent again for a gap of which no token has come since
        self._has_last = False
        self.request = request
        self._token_ids: list[int] = []  # delivered, without gap
        self._num_prompt_logprobs = 0
        self._out_of_order: dict[int, TokenDelta] = {}  # behind a gap, by first index
        self._out_of_order_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    @property
    def is_best_effort(self) -> bool:
        return not self.request.is_real_time

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        request, sampling = self.request, self.request.sampling
        num_token_ids = request.prompt_len + self.num_tokens + len(sampling.allowed_token_ids)
        num_picture_bytes = sum(len(picture.content) for picture in request.pictures)
        return _TOKEN_BYTES * num_token_ids + len(sampling.grammar) + num_picture_bytes

    @property
    def is_complete(self) -> bool:
        return self._has_last and self.stream.has_prompt_logprobs

    @property
    def has_gap(self) -> bool:
        return bool(self._out_of_order)

    def lose_worker(self) -> None:
        """Note that the link to its worker is lost. A chat is sent to the router at once, and soon again: that may take
        it for served until it hears from the worker itself that the answer has ended."""
        self.last_worker = None
        self._is_asked_soon = not self.is_best_effort

    def tell_gap(self, now: float) -> bool:
        """Note a resend to the router. Return whether the last resend was for this gap, and its worker goes on behind.
        Only a new attempt closes such a gap: the worker and its tokens behind the gap are forgotten."""
        is_lasting = self.has_gap and self._gap_told_s is not None and self._last_early_s > self._gap_told_s
        if is_lasting:
            self._out_of_order.clear()
            self.last_worker = None
        self._gap_told_s = now if self.has_gap else None
        return is_lasting

    def is_resend_due(self, now: float) -> bool:
        """Return whether it has been silent too long; True starts the next wait, of best effort twice as long."""
        if self.last_heard_s > self._last_sent_s:
            self._resend_after_s = _RESEND_AFTER_S
        is_soon = self.has_gap or self._is_asked_soon
        wait_s = min(_RESEND_SOON_S, self._resend_after_s) if is_soon else self._resend_after_s
        is_silent = now - max(self.last_heard_s, self._last_sent_s) > wait_s
        is_due = is_silent or self.is_to_be_sent
        if is_due:
            self._last_sent_s, self.is_to_be_sent, self._is_asked_soon = now, False, False
            if self.is_best_effort and is_silent:
                self._resend_after_s = min(2.0 * self._resend_after_s, _MOST_RESEND_AFTER_S)
        return is_due

    @property
    def resumed_token_ids(self) -> tuple[int, ...]:
        """Tokens after which it may be resumed: none while prompt log-probabilities are missing."""
        return tuple(self._token_ids) if self.stream.has_prompt_logprobs else ()

    def accept(self, delta: TokenDelta, now: float) -> None:
        if delta.first_index > self.num_tokens:
            if delta.first_index <= self.request.sampling.max_tokens:
                self._out_of_order[delta.first_index], self._last_early_s = delta, now
            return
        self._deliver(delta, now)
        while self._out_of_order and min(self._out_of_order) <= self.num_tokens:
            self._deliver(self._out_of_order.pop(min(self._out_of_order)), now)

    def accept_prompt_logprobs(self, message: PromptScored, now: float) -> None:
        self._out_of_order_logprobs[message.first_position - 1] = message.entries
        while self._out_of_order_logprobs:
            first = min(self._out_of_order_logprobs)
            if first > self._num_prompt_logprobs:
                break
            new = self._out_of_order_logprobs.pop(first)[self._num_prompt_logprobs - first :]
            if new:
                self._num_prompt_logprobs += len(new)
                self.last_heard_s = now
                self.stream.push_prompt_logprobs(new)
        if self.request.sampling.max_tokens == 0 and self.stream.has_prompt_logprobs and not self._has_last:
            # No token was asked for: the answer is complete with its prompt log-probabilities, even before a delta.
            self._has_last = True
            self.stream.push((), (), FinishReason.LENGTH)

    def _deliver(self, delta: TokenDelta, now: float) -> None:
        num_known = self.num_tokens - delta.first_index
        new = delta.token_ids[num_known:]
        # A repeat that ends before the delivered tokens is stale, and so is its end.
        is_stale = not new and (delta.finish_reason is None or num_known > len(delta.token_ids))
        if self._has_last or is_stale:
            return
        if not self._token_ids:  # a later attempt counts answers among its hits
            self.stream.num_cached_tokens = min(delta.num_cached_tokens, self.request.prompt_len)
            self.stream.embedding = delta.embedding
        self._token_ids += new
        self.last_heard_s, self._gap_told_s, self._is_asked_soon = now, None, False
        self._has_last = delta.finish_reason is not None
        self.stream.push(new, delta.logprobs[num_known:], delta.finish_reason)


logger = logging.getLogger(__name__)

_MAX_CHECK_PAUSE_S = 0.5
_MOST_RESENT = 64  # best-effort requests in one look, of which there are two a second: the others come next
_LATENESS = 1.1  # of a deadline: a best-effort request that is late is not given up at once
# Of requests that are sent again between two looks: a link takes twice that of chats, and streams are held up a tenth
# of a second by that of best effort.
_MOST_BYTES_AT_ONCE = {RequestClass.REAL_TIME: 1 << 27, RequestClass.BEST_EFFORT: 1 << 24}
_PAUSED = 10.0  # times `token_timeout_s` for which an answer may be silent while other requests are served
_ROUTER_RETURNS_S = 60.0  # after its loss, for which requests without a token wait for the next one
_HEAD_RETURNS_S = 10.0  # the same of new ones among several hosts: others' gateways answer if this one is cut off
_NO_ROUTER = "The router is not connected."
_NO_WORKER = "No worker of this model serves at present; they are started again."
_WORKER_RETRY_S = 10.0


class ClusterBackend:
    """A CompletionBackend and the DeploymentHandler of its links. `start` before use, `stop` once."""

    def __init__(
        self,
        connection: ClusterConnection,
        config: GatewayConfig,
        router: str = ROUTER,
        prefix_hasher: PrefixHasher | None = None,
    ) -> None:
        """`router`: the name of the deployment's. `prefix_hasher`: None: its prefix cache is off."""
        self._links = connection
        self._config = config
        self._router_name = router
        self._prefix_hasher = prefix_hasher
        self._open: dict[RequestId, UnfinishedRequest] = {}
        self._router: str | None = None  # its name while linked
        self._status: ClusterStatus | None = None
        self._num_answers: Counter[str] = Counter()
        self._num_resent_bytes: Counter[RequestClass] = Counter()  # since the last look
        self._latest_attempt = 0  # as a router last reported
        self.is_failing = False  # as the cluster's driver says, see ServedDeployment
        self._unserved_s: float | None = None  # since when the router has lacked workers; None: it does not
        self._served_s = -math.inf  # when a worker last told of something computed
        self._router_lost_s = -math.inf  # when, while there is none; without one from the beginning: long ago
        self._deadline_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._links.join(self._router_name, self)
        self._deadline_task = start_background(self._watch_deadlines(), "the deadlines of open requests")

    def stop(self, reason: str = "The gateway is shutting down.") -> None:
        """Close the link to the router; open requests fail with this reason. May be repeated."""
        if self._deadline_task is not None:
            self._deadline_task.cancel()
        for request_id in tuple(self._open):
            self._fail(request_id, Unavailable(reason))
        self._links.leave(self._router_name)
        self._router = self._status = None

    # --- CompletionBackend

    def submit(self, request: Request) -> RequestStream:
        """Send the request to the router; after a loss to the next one. Raises Unavailable if none is to come, or for
        chat no worker."""
        now = asyncio.get_running_loop().time()
        stream = RequestStream(request)
        entry = UnfinishedRequest(request, stream, now)
        if (error := self._hopeless(entry, now)) is not None:
            raise error
        if self._router is not None:
            self._submit(self._router, entry)
        self._open[request.request_id] = entry
        return stream

    def abort(self, request_id: RequestId) -> None:
        """Forget the request and abort it at the router, once that is connected."""
        if self._open.pop(request_id, None) is not None:
            self._links.send_later(self._router_name, AbortRequest(request_id))

    def status(self) -> ClusterStatus | None:
        return self._status

    def num_answers(self) -> Mapping[str, int]:
        return self._num_answers

    # --- DeploymentHandler

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def on_linked(self, peer: Peer) -> None:
        """Register with the router and resume every open request there: a restarted router knows none. Requests since
        the loss are new to the router, which may reject them."""
        self._router = peer.name
        self._links.send(peer.name, GatewayRegistered(self._links.links.node))
        self._send_all(peer.name, self._open.values())

    def on_message(self, peer: Peer, message: Message) -> None:
        """Pass tokens and failures to their requests; unknown ids belong to requests that ended here."""
        match message:
            case TokensEmitted():
                self._on_tokens(peer, message)
            case PromptScored():
                self._on_prompt_logprobs(peer, message)
            case RequestRejected():
                self._reject(message)
            case RequestFailed():
                self._take_failure(message)
            case RequestInterrupted():
                self._resume(peer, message.request_id)
            case ClusterStatus():
                self._note_status(message)
                self._latest_attempt = max(self._latest_attempt, message.latest_attempt)

    def on_lost(self, peer: Peer) -> None:
        """Wait for a router that is lost: every open request is resumed at the next one. A lost worker's last tokens
        may not have arrived although it reported the request as finished: the router is asked to resume from here,
        which it ignores for requests that it knows to be running."""
        if peer.name != self._router:
            lost = [item for item in self._open.values() if item.last_worker in (None, peer.name) or item.has_gap]
            for entry in lost:
                entry.lose_worker()
            if self._router is not None:
                self._send_all(self._router, lost)
            return
        self._router = self._status = None
        self._router_lost_s = asyncio.get_running_loop().time()

    # --- inside

    def _send_all(self, router: str, entries: Iterable[UnfinishedRequest]) -> None:
        for entry in sorted(entries, key=lambda entry: entry.is_best_effort):
            self._send(router, entry)

    def _send(self, router: str, entry: UnfinishedRequest) -> None:
        """Send a request to the router, as much at once as holds up no stream and breaks no link. The others follow a
        few at a time (_watch_deadlines)."""
        kind = entry.request.request_class
        num_before, num_bytes = self._num_resent_bytes[kind], entry.num_bytes
        if num_before and num_before + num_bytes > _MOST_BYTES_AT_ONCE[kind]:
            entry.is_to_be_sent = True
            return
        self._num_resent_bytes[kind] += num_bytes
        if entry.is_sent:
            self._links.send(router, self._resumption(entry))
        else:
            self._submit(router, entry)

    def _send_again(self, entry: UnfinishedRequest, now: float) -> None:
        """Send a request that is silent to the router. Where it says that its worker serves it, tokens may be missing
        all the same, which were lost with a link to here: then it is computed again, from where the client is."""
        if entry.tell_gap(now):
            self._links.send(self._router_name, AbortRequest(entry.request.request_id))
        self._send(self._router_name, entry)

    def _submit(self, router: str, entry: UnfinishedRequest) -> None:
        self._links.send(router, SubmitRequest(entry.request, self._block_names(entry.request)))
        entry.is_sent = True

    def _note_status(self, status: ClusterStatus) -> None:
        self._status = status
        if missing_peer(status) is None:
            self._unserved_s = None
        elif self._unserved_s is None:
            self._unserved_s = asyncio.get_running_loop().time()

    def _hopeless(self, entry: UnfinishedRequest, now: float) -> Unavailable | None:
        if self._router is None:
            return None if self._is_router_expected(entry, now) else Unavailable(_NO_ROUTER)
        if entry.is_best_effort or self._unserved_s is None:
            return None
        # Those that came when the workers were lost have been given up by then, and so would a new one be.
        is_late = not entry.is_sent and now - self._unserved_s > self._config.first_token_timeout_s
        return Unavailable(_NO_WORKER, retry_after_s=_WORKER_RETRY_S) if self.is_failing or is_late else None

    def _is_router_expected(self, entry: UnfinishedRequest, now: float) -> bool:
        is_new_among_hosts = not entry.is_sent and bool(self._links.links.node)
        return now - self._router_lost_s <= (_HEAD_RETURNS_S if is_new_among_hosts else _ROUTER_RETURNS_S)

    def _on_tokens(self, worker: Peer, message: TokensEmitted) -> None:
        self._served_s = now = asyncio.get_running_loop().time()
        has_all = len(message.compute_s) == len(message.deltas)
        for delta, compute_s in zip(message.deltas, message.compute_s if has_all else repeat(0.0), strict=False):
            self._on_delta(worker, delta, compute_s, now)

    def _on_delta(self, worker: Peer, delta: TokenDelta, compute_s: float, now: float) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        entry.stream.compute_s += compute_s
        if not delta.token_ids and delta.finish_reason is None:
            return
        entry.last_worker = worker.name
        entry.accept(delta, now)
        self._end_if_complete(worker, delta.request_id, entry)

    def _on_prompt_logprobs(self, worker: Peer, message: PromptScored) -> None:
        entry = self._open.get(message.request_id)
        if entry is None:
            return
        entry.stream.compute_s += message.compute_s
        entry.accept_prompt_logprobs(message, asyncio.get_running_loop().time())
        self._end_if_complete(worker, message.request_id, entry)

    def _end_if_complete(self, worker: Peer, request_id: RequestId, entry: UnfinishedRequest) -> None:
        if entry.is_complete:
            self._num_answers[entry.last_worker or worker.name] += 1
            del self._open[request_id]

    def _resume(self, router: Peer, request_id: RequestId) -> None:
        entry = self._open.get(request_id)
        if entry is None:
            self._links.send(router.name, AbortRequest(request_id))
        else:
            self._send(router.name, entry)

    def _resumption(self, entry: UnfinishedRequest) -> ResumeRequest:
        if self._links.timelines is not None:
            self._links.timelines.note(entry.request.request_id, Step.RESUMED)
        token_ids = entry.resumed_token_ids
        names = self._block_names(entry.request, token_ids)
        holder = entry.last_worker if entry.num_tokens and entry.last_worker is not None else ""
        return ResumeRequest(entry.request, token_ids, self._latest_attempt, names, holder)

    def _block_names(self, request: Request, generated_token_ids: tuple[int, ...] = ()) -> bytes:
        return self._prefix_hasher.block_names(request, generated_token_ids) if self._prefix_hasher is not None else b""

    def _reject(self, message: RequestRejected) -> None:
        entry = self._open.get(message.request_id)
        kind = ResourceUnavailable if entry is not None and entry.is_best_effort else Overloaded
        self._fail(message.request_id, kind(message.reason, retry_after_s=message.retry_after_s))

    def _take_failure(self, message: RequestFailed) -> None:
        if message.request_id in self._open:
            num_tokens = self._open[message.request_id].num_tokens
            words = (message.request_id, message.kind.value, num_tokens, message.reason)
            logger.warning("request %s is given up by the cluster (%s) after %d tokens: %s", *words)
        self._fail(message.request_id, _error_of(message))

    def _fail(self, request_id: RequestId, error: GenerationError) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.stream.fail(error)

    def _patience_s(self, entry: UnfinishedRequest, now: float) -> float:
        """Return for how long the request may be silent. Best effort waits for all chat before it, and may pause. Chat
        that has begun pauses where memory is short. While others are served it has not been forgotten, and what its
        client has is not thrown away: only where nothing is computed at all the short time counts."""
        request, config = entry.request, self._config
        if entry.is_best_effort:
            return max(config.best_effort_timeout_s, _LATENESS * (request.slo.deadline_s or 0.0))
        if not entry.num_tokens:
            return config.first_token_timeout_s
        is_served = now - self._served_s <= config.token_timeout_s
        return config.token_timeout_s * (_PAUSED if is_served else 1.0)

    async def _watch_deadlines(self) -> None:
        first_s, next_s = self._config.first_token_timeout_s, self._config.token_timeout_s
        pause_s = min(_MAX_CHECK_PAUSE_S, first_s / 4, next_s / 4)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            now, num_left = loop.time(), _MOST_RESENT
            self._num_resent_bytes.clear()
            for request_id, entry in tuple(self._open.items()):
                may_be_sent = self._router is not None and (num_left > 0 or not entry.is_best_effort)
                if may_be_sent and entry.is_resend_due(now):
                    num_left -= entry.is_best_effort
                    self._send_again(entry, now)
                limit_s = self._patience_s(entry, now)
                if now - entry.last_heard_s > limit_s:
                    self.abort(request_id)
                    self._log_silence(entry, now)
                    entry.stream.fail(TimedOut(f"No token came for {limit_s:g} s."))
                elif not entry.num_tokens and (error := self._hopeless(entry, now)) is not None:
                    self.abort(request_id)
                    entry.stream.fail(error)

    def _log_silence(self, entry: UnfinishedRequest, now: float) -> None:
        logger.warning(
            "request %s, %s, is given up: silent for %.1f s after %d tokens, the last from %s; anything was last "
            "computed %.1f s ago, %d requests are open, the router %s connected",
            entry.request.request_id,
            entry.request.request_class.name.lower(),
            now - entry.last_heard_s,
            entry.num_tokens,
            entry.last_worker,
            now - self._served_s,
            len(self._open),
            "is" if self._router is not None else "is not",
        )


def _error_of(message: RequestFailed) -> GenerationError:
    match message.kind:
        case FailureKind.OVERLOADED:
            return Overloaded(message.reason, retry_after_s=1.0)
        case FailureKind.WORKER_LOST:
            return Unavailable(message.reason)
        case FailureKind.UNSERVABLE:
            return Unservable(message.reason)
        case FailureKind.GRAMMAR:
            return GrammarFailed(message.reason)
        case FailureKind.INTERNAL:
            return GenerationFailed("The request failed inside the cluster.", reason=message.reason)

"""The backend of a running cluster: requests go to the router, tokens come straight from the workers.

The life of a request here: 1. `submit` sends it to the router. 2. Workers send deltas; they are put in order by
`first_index`, repeats are dropped, and nothing behind a gap is given on until the gap is filled. 3. It leaves the table
with its last token, by `abort`, or by failing: refused by the router, failed by it, the router lost before the first
token, or silence past its deadline, which one sweep watches for all requests.
Only the gateway knows which tokens the client has: when the router says that a request was interrupted, or comes back
after a loss, it is told where to go on.
"""

import asyncio
import logging

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.gateway.backend.interface import RequestStream
from alignedserve.gateway.errors import (
    GenerationError,
    GenerationFailed,
    Overloaded,
    TimedOut,
    Unavailable,
    Unservable,
)
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokenDelta,
    TokensEmitted,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.wire import Codec, Message
from alignedserve.runtime.process.background_tasks import start_background
from alignedserve.runtime.process.link_manager import LinkManager
from alignedserve.runtime.process.links import Identity, Peer

logger = logging.getLogger(__name__)

_MAX_SWEEP_PAUSE_S = 0.5
# A request that is silent for this long is put to the router again, which ignores it if all is well: whatever was lost
# on the way, and by whom, nobody waits for ever.
_ASK_AGAIN_S = 10.0


class ClusterBackend:
    """A CompletionBackend and the LinkHandler of the gateway's links. `start` before use, `stop` once."""

    def __init__(self, *, identity: Identity, router_address: str, own_address: str, config: GatewayConfig) -> None:
        self._router_address = router_address
        self._own_address = own_address
        self._config = config
        self._switchboard = LinkManager(identity, Codec(GatewayInbound), self)
        self._open: dict[RequestId, _OpenRequest] = {}
        self._router: str | None = None  # its name while linked
        self._status: ClusterStatus | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen for workers and dial the router."""
        await self._switchboard.listen(self._own_address)
        self._switchboard.dial(self._router_address)
        self._sweeper = start_background(self._sweep(), "the sweep over open requests")

    async def stop(self) -> None:
        """Close every link; open requests fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for request_id in tuple(self._open):
            self._fail(request_id, Unavailable("The gateway is shutting down."))
        await self._switchboard.close()

    # --- CompletionBackend

    def submit(self, request: Request) -> RequestStream:
        """Send the request to the router. Raises Unavailable while there is none."""
        if self._router is None or not self._switchboard.send(self._router, SubmitRequest(request)):
            raise Unavailable("The router is not connected.")
        stream = RequestStream(request)
        self._open[request.request_id] = _OpenRequest(request, stream, asyncio.get_running_loop().time())
        return stream

    def abort(self, request_id: RequestId) -> None:
        """Forget the request and tell the router; while there is none, as soon as it is back."""
        if self._open.pop(request_id, None) is not None:
            self._switchboard.send_to(self._router_address, AbortRequest(request_id))

    def status(self) -> ClusterStatus | None:
        """The router's last report; None while it is not connected."""
        return self._status

    # --- LinkHandler

    def on_linked(self, peer: Peer) -> None:
        """Remember the router. One that comes back knows nothing of what is open; it is told."""
        if peer.role is not Role.ROUTER:
            return
        self._router = peer.name
        for entry in self._open.values():
            self._switchboard.send(peer.name, entry.resumption())

    def on_message(self, peer: Peer, message: Message) -> None:
        """Hand output and verdicts to their requests; unknown ids are of requests that ended here."""
        match message:
            case TokensEmitted():
                now = asyncio.get_running_loop().time()
                for delta in message.deltas:
                    self._on_delta(peer, delta, now)
            case PromptScored():
                self._on_scores(message)
            case RequestRejected():
                self._fail(message.request_id, Overloaded(message.reason, retry_after_s=message.retry_after_s))
            case RequestFailed():
                self._fail(message.request_id, _error_of(message))
            case RequestInterrupted():
                self._resume(peer, message.request_id)
            case ClusterStatus():
                self._status = message

    def on_lost(self, peer: Peer) -> None:
        """Without its router a request that has no token yet fails; the others go on, as workers need no router.

        What a lost worker had sent last may not have arrived, though it has told the router that it was done: the
        router is asked to go on from here, which it ignores for requests that it knows to be going on.
        """
        if peer.name != self._router:
            for entry in self._open.values():
                if entry.last_worker in (None, peer.name) and self._router is not None:
                    self._switchboard.send(self._router, entry.resumption())
            return
        self._router = self._status = None
        waiting = [request_id for request_id, entry in self._open.items() if entry.num_tokens == 0]
        for request_id in waiting:
            self._fail(request_id, Unavailable("The router was lost before the first token."))

    # --- inside

    def _on_delta(self, worker: Peer, delta: TokenDelta, now: float) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        entry.last_worker = worker.name
        entry.accept(delta, now)
        if entry.is_complete:
            del self._open[delta.request_id]

    def _on_scores(self, message: PromptScored) -> None:
        entry = self._open.get(message.request_id)
        if entry is None:
            return
        entry.accept_scores(message, asyncio.get_running_loop().time())
        if entry.is_complete:
            del self._open[message.request_id]

    def _resume(self, router: Peer, request_id: RequestId) -> None:
        entry = self._open.get(request_id)
        self._switchboard.send(router.name, AbortRequest(request_id) if entry is None else entry.resumption())

    def _fail(self, request_id: RequestId, error: GenerationError) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.stream.fail(error)

    async def _sweep(self) -> None:
        """Fail whatever is silent past its deadline, and have it stopped."""
        first_s, next_s = self._config.first_token_timeout_s, self._config.token_timeout_s
        pause_s = min(_MAX_SWEEP_PAUSE_S, first_s / 4, next_s / 4)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            now = loop.time()
            for request_id, entry in tuple(self._open.items()):
                if self._router is not None and entry.is_due_to_ask(now):
                    self._switchboard.send(self._router, entry.resumption())
                limit_s = next_s if entry.num_tokens else first_s
                if now - entry.last_heard_s > limit_s:
                    self.abort(request_id)
                    entry.stream.fail(TimedOut(f"No token came for {limit_s:g} s."))


class _OpenRequest:
    """One request that has not ended: what came of it, in which order."""

    def __init__(self, request: Request, stream: RequestStream, now: float) -> None:
        self.stream = stream
        self.last_heard_s = now  # when the answer last grew
        self.last_worker: str | None = None  # whose tokens came last
        self._last_asked_s = now
        self._has_last = False
        self._request = request
        self._token_ids: list[int] = []  # given on, without gap
        self._num_scores = 0
        self._early: dict[int, TokenDelta] = {}  # behind a gap, by first index
        self._early_scores: dict[int, tuple[TokenLogprob, ...]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens given on."""
        return len(self._token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come: the last token and all prompt scores are here."""
        return self._has_last and self.stream.num_scores_missing <= 0

    def is_due_to_ask(self, now: float) -> bool:
        """Whether it has been silent for long since it was heard or last asked about; True starts the next wait."""
        is_due = now - max(self.last_heard_s, self._last_asked_s) > _ASK_AGAIN_S
        if is_due:
            self._last_asked_s = now
        return is_due

    def resumption(self) -> ResumeRequest:
        """Where to go on. With prompt scores missing that is the beginning; repeated tokens are dropped."""
        token_ids = self._token_ids if self.stream.num_scores_missing <= 0 else ()
        return ResumeRequest(self._request, tuple(token_ids))

    def accept(self, delta: TokenDelta, now: float) -> None:
        """Take a delta, early, in place or repeated."""
        if delta.first_index > self.num_tokens:
            if delta.first_index <= self._request.sampling.max_tokens:
                self._early[delta.first_index] = delta
            return
        self._give(delta, now)
        while self._early and min(self._early) <= self.num_tokens:
            self._give(self._early.pop(min(self._early)), now)

    def accept_scores(self, message: PromptScored, now: float) -> None:
        """Take prompt scores; the first entry belongs to position 1."""
        self._early_scores[message.first_position - 1] = message.entries
        while self._early_scores:
            first = min(self._early_scores)
            if first > self._num_scores:
                break
            new = self._early_scores.pop(first)[self._num_scores - first :]
            if new:
                self._num_scores += len(new)
                self.last_heard_s = now
                self.stream.push_scores(new)
        if self._request.sampling.max_tokens == 0 and self.stream.num_scores_missing <= 0 and not self._has_last:
            # Nothing was to be generated: with its scores the answer is complete, whether or not a delta says so.
            self._has_last = True
            self.stream.push((), (), FinishReason.LENGTH)

    def _give(self, delta: TokenDelta, now: float) -> None:
        num_known = self.num_tokens - delta.first_index
        new = delta.token_ids[num_known:]
        # A repeat that ends before what was given on is no news, and neither is its end.
        is_old = not new and (delta.finish_reason is None or num_known > len(delta.token_ids))
        if self._has_last or is_old:
            return
        self._token_ids += new
        self.last_heard_s = now
        self._has_last = delta.finish_reason is not None
        self.stream.push(new, delta.logprobs[num_known:], delta.finish_reason)


def _error_of(message: RequestFailed) -> GenerationError:
    match message.kind:
        case FailureKind.OVERLOADED:
            return Overloaded(message.reason, retry_after_s=1.0)
        case FailureKind.WORKER_LOST:
            return Unavailable(message.reason)
        case FailureKind.UNSERVABLE:
            return Unservable(message.reason)
        case FailureKind.INTERNAL:
            return GenerationFailed("The request failed inside the cluster.")

"""The client of a LogicCluster: a gateway without HTTP that resumes requests after losses."""

from dataclasses import dataclass, field

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    GatewayRegistered,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    TokensEmitted,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES
from alignedserve.prefix_cache.block_hashes import BlockHasher
from alignedserve.process.addresses import ROUTER
from tests.support.token_engine import BLOCK_SIZE


def block_names_of(request: Request, generated: tuple[int, ...] = ()) -> bytes:
    """Return the names of the full blocks of a context, as the gateway tells them to the router."""
    blocks = BlockHasher(BLOCK_SIZE).named(request.prefix_root, request.prompt_token_ids + generated)
    return b"".join(block.block_hash[:BLOCK_NAME_BYTES] for block in blocks) if request.prefix_root else b""


@dataclass
class Client:
    """The gateway: collects tokens as a client sees them. `node`: where it is, as workers register it."""

    node: str = ""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    ends: dict[RequestId, FinishReason | RequestFailed | RequestRejected] = field(default_factory=dict)
    aborted: set[RequestId] = field(default_factory=set)
    early: dict[tuple[RequestId, int], tuple[list[int], FinishReason | None]] = field(default_factory=dict)
    status: ClusterStatus | None = None
    holders: dict[RequestId, str] = field(default_factory=dict)  # whose tokens came last, while it is linked

    def on_event(self, event: CommonEvent) -> list[Send]:
        if isinstance(event, PeerConnected) and event.role is Role.ROUTER:
            registered = [Send(ROUTER, GatewayRegistered(self.node))]
            return [*registered, *(Send(ROUTER, self._resumption(request_id)) for request_id in self._open())]
        if isinstance(event, PeerDisconnected) and event.role is not Role.ROUTER:
            self.holders = {key: holder for key, holder in self.holders.items() if holder != event.peer}
            return [Send(ROUTER, self._resumption(request_id)) for request_id in self._open()]
        if not isinstance(event, Received):
            return []
        message = event.message
        match message:
            case TokensEmitted():
                for delta in message.deltas:
                    self.holders[delta.request_id] = event.peer
                    self.early[delta.request_id, delta.first_index] = (list(delta.token_ids), delta.finish_reason)
                    self._take(delta.request_id)
            case RequestFailed() | RequestRejected():
                self._end(message.request_id, message)
            case RequestInterrupted() if message.request_id in self._open():
                return [Send(ROUTER, self._resumption(message.request_id))]
            case RequestInterrupted():
                return [Send(ROUTER, AbortRequest(message.request_id))]
            case ClusterStatus():
                self.status = message
        return []

    def _open(self) -> list[RequestId]:
        return [key for key in self.requests if key not in self.ends and key not in self.aborted]

    def _resumption(self, request_id: RequestId) -> ResumeRequest:
        latest_attempt = self.status.latest_attempt if self.status is not None else 0
        request, generated = self.requests[request_id], tuple(self.answers[request_id])
        names, holder = block_names_of(request, generated), self.holders.get(request_id, "") if generated else ""
        return ResumeRequest(request, generated, latest_attempt, names, holder)

    def _take(self, request_id: RequestId) -> None:
        answer = self.answers[request_id]
        while (entry := self.early.pop((request_id, len(answer)), None)) is not None and request_id not in self.ends:
            answer += entry[0]
            if entry[1] is not None:
                self._end(request_id, entry[1])

    def _end(self, request_id: RequestId, end: FinishReason | RequestFailed | RequestRejected) -> None:
        assert request_id not in self.ends, "a request ended twice"
        self.ends[request_id] = end

"""A router to tell things to, with its requests in every stage. At time 0 their epochs are numbered 1, 2, 3."""

from typing import Any

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.lifecycle import epoch_end
from alignedserve.core.request import Request
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest, ClusterStatus, RequestInterrupted, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import (
    BatchFormed,
    BatchReceived,
    DropRequest,
    FormBatch,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest
from router.logic import RouterLogic
from router.moves.leans import Leans
from router.placement import Placement
from router.policies.bypass import UrgentBypass
from router.policies.prefill_order import LeastSlackOrder, PrefillOrder
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, epoch, request, worker

BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM_FIRST = Send(POOL, FormBatch(BATCH, ASKED, max_blocks=20, max_requests=1))
INTERRUPTED = Send(GATEWAY, RequestInterrupted(R1))
# r1's first epoch, step by step.
DISPATCHED, POOLED, GRANTED, END = epoch(1), epoch(1, 1), epoch(1, 2), epoch_end(epoch(1))


class RouterHarness:
    """A router that is told things at a time that only moves when asked to."""

    def __init__(
        self, batching: BatchingConfig | None = None, order: PrefillOrder | None = None, **config: Any
    ) -> None:
        self.now = 0.0
        section = RouterConfig(**config)
        self.logic = RouterLogic(
            config=section,
            placement=Placement(
                max_candidate_requests=section.max_candidate_requests, batching=batching or BatchingConfig()
            ),
            order=order or LeastSlackOrder(),
            bypass=UrgentBypass(),
            leans=Leans(),
        )
        self.link(GATEWAY, Role.GATEWAY)

    def link(self, peer: str, role: Role) -> list[Send]:
        return self.logic.on_event(PeerConnected(role, peer), self.now)

    def lose(self, peer: str) -> list[Send]:
        role = {GATEWAY: Role.GATEWAY, POOL: Role.KV_POOL, PREFILL: Role.PREFILL_WORKER}.get(peer, Role.DECODE_WORKER)
        return self.logic.on_event(PeerDisconnected(role, peer), self.now)

    def hear(self, peer: str, message: Message) -> list[Send]:
        return self.logic.on_event(Received(peer, message), self.now)

    def submit(self, of: Request) -> list[Send]:
        return self.hear(GATEWAY, SubmitRequest(of))

    def tick(self) -> list[Send]:
        """Return what follows, reports to gateways left out."""
        return [one for one in self.reports() if not isinstance(one.message, ClusterStatus)]

    def reports(self) -> list[Send]:
        return self.logic.on_event(Ticked(), self.now)

    def status(self) -> ClusterStatus:
        for _ in range(4):
            for command in self.reports():
                if isinstance(command.message, ClusterStatus):
                    return command.message
        raise AssertionError("no status within four ticks")


def connected_router(**config: Any) -> RouterHarness:
    """Build a router with one gateway, pool, prefill worker and decode worker."""
    made = RouterHarness(**config)
    made.hear(POOL, PoolRegistered(100))
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    made.hear(DECODE, worker())
    return made


def colocated_router(**changes: Any) -> RouterHarness:
    made = RouterHarness()
    made.hear(DECODE, worker(can_prefill=True, **changes))
    return made


def prefilling(**config: Any) -> RouterHarness:
    """r1 is with the prefill worker."""
    made = connected_router(**config)
    made.submit(request())
    return made


def pooled(**config: Any) -> RouterHarness:
    """r1 lies in the pool, which was asked for a batch."""
    made = prefilling(**config)
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    made.hear(POOL, RequestPooled(R1, POOLED, 4, 1))
    return made


def granted(**config: Any) -> RouterHarness:
    """r1 is on its way to the decode worker."""
    made = pooled(**config)
    made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),)))
    return made


def decoding(**config: Any) -> RouterHarness:
    """r1 has arrived there."""
    made = granted(**config)
    made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),)))
    return made


def given(of: Request, nth: int, *generated: int, to: str = PREFILL, **changes: Any) -> Send:
    """Return what gives a request out for the n-th time."""
    changes.setdefault("predicted_output_len", float(of.sampling.max_tokens))  # while nothing has finished
    return Send(to, PrefillRequest(of, epoch(nth), generated, **changes))


def dropped(request_id: RequestId = R1, nth: int = 1) -> Send:
    """Return what tells the pool that the n-th epoch of a request has ended."""
    return Send(POOL, DropRequest(request_id, epoch_end(epoch(nth))))


def aborted(by: str, nth: int = 1) -> Send:
    """Return what tells the holder of r1 that its n-th epoch has ended."""
    return Send(by, AbortRequest(R1, epoch_end(epoch(nth))))

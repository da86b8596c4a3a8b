"""A router to tell things to, with its requests in every stage. At time 0 attempts are numbered 1, 2, 3."""

from typing import Any

from alignedserve.config.sections import RouterConfig
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.core.request import Request
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    BatchFormed,
    BatchReceived,
    ClusterStatus,
    FormBatch,
    PoolRegistered,
    PrefillCompleted,
    PrefillRequest,
    RequestInterrupted,
    RequestPooled,
    SubmitRequest,
)
from alignedserve.messages.wire import Message
from router.logic import RouterLogic
from router.policies.prefill_order import LeastSlackOrder
from tests.samples import DECODE, GATEWAY, POOL, PREFILL, R1, request, worker

BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM_FIRST = Send(POOL, FormBatch(BATCH, ASKED, max_blocks=20, max_requests=1))
INTERRUPTED = Send(GATEWAY, RequestInterrupted(R1))


class Desk:
    """A router that is told things at a time that only moves when asked to."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.logic = RouterLogic(config=RouterConfig(**config), order=LeastSlackOrder())
        self.link(GATEWAY, Role.GATEWAY)

    def link(self, peer: str, role: Role) -> list[Send]:
        return self.logic.on_event(PeerLinked(role, peer), self.now)

    def lose(self, peer: str) -> list[Send]:
        role = {GATEWAY: Role.GATEWAY, POOL: Role.KV_POOL, PREFILL: Role.PREFILL_WORKER}.get(peer, Role.DECODE_WORKER)
        return self.logic.on_event(PeerLost(role, peer), self.now)

    def hear(self, peer: str, message: Message) -> list[Send]:
        return self.logic.on_event(Received(peer, message), self.now)

    def submit(self, of: Request) -> list[Send]:
        return self.hear(GATEWAY, SubmitRequest(of))

    def tick(self) -> list[Send]:
        return self.logic.on_event(Ticked(), self.now)

    def status(self) -> ClusterStatus:
        for _ in range(4):
            for command in self.tick():
                if isinstance(command.message, ClusterStatus):
                    return command.message
        raise AssertionError("no status within four ticks")


def desk(**config: Any) -> Desk:
    """With one gateway, pool, prefill worker and decode worker."""
    made = Desk(**config)
    made.hear(POOL, PoolRegistered(100))
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    made.hear(DECODE, worker())
    return made


def colocated_desk(**changes: Any) -> Desk:
    made = Desk()
    made.hear(DECODE, worker(can_prefill=True, **changes))
    return made


def prefilling(**config: Any) -> Desk:
    """r1 is with the prefill worker."""
    made = desk(**config)
    made.submit(request())
    return made


def pooled(**config: Any) -> Desk:
    """r1 lies in the pool, which was asked for a batch."""
    made = prefilling(**config)
    made.hear(PREFILL, PrefillCompleted(R1, 1, 4))
    made.hear(POOL, RequestPooled(R1, 1, 4, 1))
    return made


def granted(**config: Any) -> Desk:
    """r1 is on its way to the decode worker."""
    made = pooled(**config)
    made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, 1),)))
    return made


def decoding(**config: Any) -> Desk:
    """r1 has arrived there."""
    made = granted(**config)
    made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),)))
    return made


def given(of: Request, attempt: int, *generated: int, to: str = PREFILL) -> Send:
    return Send(to, PrefillRequest(of, attempt, generated))

"""Reports of a worker to its router: registration, load, ends of requests, and sums of the iteration log."""

from collections.abc import Iterable
from typing import Any

import msgspec

from alignedserve.config.sections import DecodeWorkerConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import PredictedSpeed, ShownSpeed
from alignedserve.messages.cluster_view import WorkerSpeed
from alignedserve.messages.events import Send
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    DecodedRequest,
    IterationLogReport,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    RequestStayed,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.request import WorkerRequest


class RouterLink:
    """The router, if one is connected, and the load last reported to it. Without a router nothing is sent."""

    def __init__(self, registered: WorkerRegistered) -> None:
        self._registered = registered
        self._router: str | None = None
        self._reported: WorkerLoad | None = None
        self._latest_attempt = 0

    @property
    def is_connected(self) -> bool:
        return self._router is not None

    def connected(self, router: str, members: Iterable[WorkerRequest] = ()) -> list[Send]:
        self._router = router
        self._reported = None
        decoding = tuple(
            DecodedRequest(request.request.request_id, request.attempt, request.num_received) for request in members
        )
        latest_attempt = self._latest_attempt
        return self.send(msgspec.structs.replace(self._registered, latest_attempt=latest_attempt, decoding=decoding))

    def observe(self, attempt: int) -> None:
        self._latest_attempt = max(self._latest_attempt, attempt)

    def send(self, message: Message) -> list[Send]:
        return [Send(self._router, message)] if self._router is not None else []

    def prefilled(self, member: WorkerRequest) -> list[Send]:
        """Report that all but the token sampled last is computed, as far as it was not cached."""
        num_tokens = member.request.prompt_len + max(len(member.generated_token_ids) - 1, 0) - member.num_hit_tokens
        return self.send(PrefillCompleted(member.request.request_id, member.attempt, num_tokens))

    def finished(self, member: WorkerRequest) -> list[Send]:
        return self.send(RequestFinished(member.request.request_id, member.attempt, len(member.generated_token_ids)))

    def failed(self, member: WorkerRequest | PrefillRequest, kind: FailureKind, reason: str) -> list[Send]:
        return self.send(AttemptFailed(member.request.request_id, member.attempt, kind, reason))

    def too_large(self, member: WorkerRequest | PrefillRequest, worker: str) -> list[Send]:
        reason = f"its context needs more cache blocks than a {worker} has"
        return self.failed(member, FailureKind.UNSERVABLE, reason)

    def stayed(self, request_id: RequestId, attempt: int) -> list[Send]:
        return self.send(RequestStayed(request_id, attempt))

    @property
    def is_load_awaited(self) -> bool:
        return self._reported is None

    def await_load(self) -> None:
        """Report the load next time even if it has not changed: the router waits for it."""
        self._reported = None

    def load(self, load: WorkerLoad) -> list[Send]:
        if self._router is None or load == self._reported:
            return []
        self._reported = load
        return self.send(load)

    def totals(self, iteration_log: IterationLog, now: float, shown: ShownSpeed | None = None) -> list[Send]:
        """Report the sums that the log gained, about once a second; they are kept until there is a router."""
        gained = iteration_log.take_totals(now) if self._router is not None else None
        if gained is None:
            return []
        speed = WorkerSpeed() if shown is None else self._faster(*shown.at(now))
        return self.send(IterationLogReport(gained, iteration_log.take_tokens(), iteration_log.latest_batch, speed))

    def _faster(self, prompt_s: float, shared_token_s: float) -> WorkerSpeed:
        speed = self._registered.speed
        faster = msgspec.structs.replace(
            speed,
            prompt_s=min(prompt_s, speed.prompt_s),
            shared_token_s=min(shared_token_s, speed.shared_token_s),
        )
        return WorkerSpeed() if faster == speed else faster


def registration_of(
    layout: BlockLayout, num_blocks: int, max_running_requests: int, pool_name: str = "", **fields: Any
) -> WorkerRegistered:
    """`fields`: others of WorkerRegistered."""
    return WorkerRegistered(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_running_requests=max_running_requests,
        pool_name=pool_name,
        layout_digest=layout.digest().hex(),
        state_blocks=layout.state_blocks,
        **{"can_prefill": False, "can_decode": False} | fields,
    )


def num_active(config: DecodeWorkerConfig) -> int:
    """Return how many workers of a node have work, where others stand by; 0: all have. `config`: of this node."""
    return config.count if config.standby else 0


def with_speed(registered: WorkerRegistered, speed: PredictedSpeed | None) -> WorkerRegistered:
    return registered if speed is None else msgspec.structs.replace(registered, speed=WorkerSpeed(*speed))

"""The sections of what decides: the router, the scheduling policy, the formation of batches."""

from typing import Any

import msgspec

from alignedserve.config.sections.base import MIB, Section

MAX_INTERFERENCE = 10.0


class RouterConfig(Section, frozen=True):
    """Admission, queues, placement."""

    max_queued_requests: int = 1024  # real-time ones
    max_queued_best_effort_requests: int = 8192
    max_queued_tokens: int = 2_000_000  # of each class
    # Real-time requests are refused while those accepted would wait for their first token for longer than this, by the
    # speed of late (router/admission.py); unset: three quarters of gateway.first_token_timeout_s, simulated none.
    max_real_time_wait_s: float | None = None
    prefill_order: str | None = None  # name of an order in router/policies.py; the policy's own when unset
    direct_handoff: bool | None = None  # prefills go straight to decode workers; as the policy has it when unset
    # Of separate workers: tokens handed to one to prefill, the rest waits in the router; requests granted to a decode
    # worker ahead of need. Other workers get requests by their free places (decode.max_waiting_requests).
    max_prefill_tokens_per_worker: int = 8192
    max_candidate_requests: int = 16
    # Share of the prompt tokens that best effort has while real-time requests wait (router/prefill_queue.py).
    best_effort_floor: float = 0.05
    max_retries: int = 3  # after that a request fails; those before it came 256 tokens further are forgotten
    length_predictor: str = "hashed_ngrams"  # a name in router/prediction
    max_learnt_bytes: int = 192 * MIB  # of the finished requests that it learns from; the oldest make room
    # Decodes move between elastic workers of several nodes too, where their own node has no time or room for them and
    # the link is fast enough (router/leans.py).
    moves_between_nodes: bool = False

    def __post_init__(self) -> None:
        self._require_positive("max_queued_requests", "max_queued_tokens", "max_prefill_tokens_per_worker")
        self._require_positive("max_candidate_requests", "max_queued_best_effort_requests")
        if self.max_real_time_wait_s is not None:
            self._require_positive("max_real_time_wait_s")
        self._require(0.0 <= self.best_effort_floor <= 0.5, "best_effort_floor", "must be at least 0 and at most 0.5")
        self._require(self.max_learnt_bytes >= MIB, "max_learnt_bytes", f"must be at least {MIB}")
        self._require(self.max_retries >= 0, "max_retries", "must be at least 0")


class SchedulingConfig(Section, frozen=True):
    """Scheduling policy, from the queue to the iteration."""

    policy: str = "aligned_slo"  # name of a policy in alignedserve/scheduling/policies
    policy_params: dict[str, Any] = msgspec.field(default_factory=dict)  # parameters of that policy, by name
    # Best-effort work prolongs gaps between tokens of real-time requests by at most this factor, by the cost model;
    # unset: as far as objectives allow.
    interference: float | None = None
    # A pass of best-effort work stops between two of its layers for real-time prompts that come meanwhile, and goes on
    # after them (scheduling/yielding.py); unset: on CPUs, under aligned_slo.
    yield_between_layers: bool | None = None
    # Share of the time that best effort has all the same where passes stop; unset: that of the router.
    best_effort_floor: float | None = None

    def __post_init__(self) -> None:
        self._require(bool(self.policy), "policy", "must name a policy")
        self._require(
            self.best_effort_floor is None or 0.0 <= self.best_effort_floor <= 0.5,
            "best_effort_floor",
            "must be at least 0 and at most 0.5",
        )
        is_within = self.interference is None or 1.0 <= self.interference <= MAX_INTERFERENCE
        limits = f"must be at least 1 and at most {MAX_INTERFERENCE:g}, or unset for no bound"
        self._require(is_within, "interference", limits)


class BatchingConfig(Section, frozen=True):
    """Formation of decode batches (AlignedServe, sections 3.3 and 4.1), for router, pool and decode workers."""

    policy: str | None = None  # name of a batch former in kvpool/policies; the scheduling policy's own when unset
    min_requests: int = 36  # a batch of fewer does not saturate a decode worker
    low_running_share: float = 0.75  # with fewer of a worker's places and blocks taken, its next batch takes over
    max_block_share: float = 0.4  # of a decode worker's blocks, for what is granted to it ahead of need
    starvation_s: float = 2.0  # lengths that were in no batch for this long go first
    # Share of the tokens that best effort has in batches while real-time requests wait for one; unset: that of the
    # router, where its order of prompts knows classes.
    best_effort_floor: float | None = None
    # Share of a TPOT objective that an iteration of a decode worker may take. Up to it requests of any length join what
    # runs where mixing lengths costs nothing, the shortest first, and prompts wait for such room; unset: neither.
    pack_share: float | None = None

    def __post_init__(self) -> None:
        self._require_positive("min_requests", "starvation_s")
        self._require(
            self.pack_share is None or 0.0 < self.pack_share <= 1.0, "pack_share", "must be above 0 and at most 1"
        )
        self._require(
            self.best_effort_floor is None or 0.0 <= self.best_effort_floor <= 0.5,
            "best_effort_floor",
            "must be at least 0 and at most 0.5",
        )
        for share in ("low_running_share", "max_block_share"):
            self._require(0.0 < getattr(self, share) <= 1.0, share, "must be above 0 and at most 1")

    @property
    def is_aligned(self) -> bool:
        """Return whether batches are of similar length; otherwise none is worth keeping apart."""
        return self.policy != "fcfs"

    def enough_requests(self, max_running_requests: int) -> int:
        """Return the fewest requests worth a switch of batches: at most half of `max_running_requests`."""
        return min(self.min_requests, max(max_running_requests // 2, 1)) if self.is_aligned else 1

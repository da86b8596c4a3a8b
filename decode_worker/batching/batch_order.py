"""The order of batches on a decode worker, and when the next replaces the running one (AlignedServe, section 3.4).

A full batch (`min_requests` or more) of similar lengths replaces the running batch in two cases: the running batch has
become too small to saturate the worker (and no longer fills its memory), or the full batch has waited for
`starvation_s`. The two mix from the new batch's first request until the last old one has left: the batch switch. A
smaller batch, or a batch of any lengths (FCFS), causes no switch: it joins the running batch, whose lengths are then no
longer similar. With a cost model, a batch may join at any time if its lengths add no cost to the running ones.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from alignedserve.core.ids import BatchId
from alignedserve.messages.fields import NO_BATCH
from decode_worker.held_requests import HeldRequest
from decode_worker.state import Candidate, RunningRequest


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Limits that decide when to switch batches."""

    min_requests: int = 36  # a batch of fewer joins what runs
    low_running: int = 36  # with fewer running and no candidate requests, the next batch takes over
    starvation_s: float = 2.0
    low_blocks: int | None = None  # not while this many blocks or more are taken; None: however many


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of the running batch."""

    max_running_requests: int
    switch: SwitchLimits = field(default_factory=SwitchLimits)


@dataclass(slots=True)
class WaitingBatch:
    """A batch granted to this worker; none of its requests runs yet."""

    batch_id: BatchId
    is_aligned: bool
    num_requests: int
    granted_s: float


class BatchOrder:
    """The running batch's number and the batches behind it."""

    def __init__(
        self, limits: SwitchLimits, is_mixing_cheaper: Callable[[Collection[int]], bool] | None = None
    ) -> None:
        """`is_mixing_cheaper`: whether decodes of these contexts cost less beside the running ones than after them;
        None: never, so batches of different lengths stay apart."""
        self._limits = limits
        self._is_mixing_cheaper = is_mixing_cheaper
        self._waiting: dict[BatchId, WaitingBatch] = {}
        self.version = 0  # changes with which batches there are
        self.running_id = NO_BATCH
        self.is_aligned = False  # whether what runs is of similar length
        self.is_switching = False  # whether requests of the batch before may still run

    def granted(self, batch: WaitingBatch) -> None:
        """Queue a batch."""
        self.version += 1
        self._waiting[batch.batch_id] = batch

    def is_outgoing(self, running: RunningRequest | HeldRequest) -> bool:
        """Return whether this request belongs to the batch that is being replaced."""
        return running.batch_id not in (self.running_id, NO_BATCH)

    def is_stray(self, candidate: Candidate) -> bool:
        """Return whether this candidate belongs to a batch that neither runs nor waits."""
        return candidate.batch_id not in (self.running_id, NO_BATCH) and candidate.batch_id not in self._waiting

    def joins_running(self, candidate: Candidate) -> bool:
        """Return whether this candidate is a candidate request of the running batch, not of a waiting one."""
        return candidate.batch_id in (self.running_id, NO_BATCH)

    def is_overdue(self, now: float) -> bool:
        """Return whether the next batch has waited longer than `starvation_s`, and so takes over in any case."""
        following = next(iter(self._waiting.values()), None)
        return following is not None and now - following.granted_s >= self._limits.starvation_s

    def choose(
        self, candidates: Iterable[Candidate], num_running: int, now: float, *, num_blocks: int = 0
    ) -> list[Candidate]:
        """Return the candidates that may enter now, in order: candidate requests first, else the next batch's.

        `num_blocks`: held by running requests. This also starts the next batch when it is due: its requests are then
        candidate requests of the running batch.
        """
        by_id: dict[BatchId, list[Candidate]] = {}
        for candidate in candidates:
            by_id.setdefault(candidate.batch_id, []).append(candidate)
        self._forget_empty(by_id)
        following = next(iter(self._waiting.values()), None)
        is_overdue = self.is_overdue(now)
        own = by_id.get(NO_BATCH, []) + by_id.get(self.running_id, []) * (self.running_id != NO_BATCH)
        if following is None or (own and not is_overdue):
            return own
        members = by_id[following.batch_id]
        if not is_overdue and self._should_mix(members, num_running):
            self._begin(following)
            self._join(members)
            return members
        if not (is_overdue or self._may_follow(following, num_running, num_blocks)):
            return own
        self._take_up(following, members, num_running)
        return by_id.get(NO_BATCH, []) + members

    def _forget_empty(self, by_id: dict[BatchId, list[Candidate]]) -> None:
        for batch_id in [batch_id for batch_id in self._waiting if batch_id not in by_id]:
            del self._waiting[batch_id]
            self.version += 1

    def _may_follow(self, following: WaitingBatch, num_running: int, num_blocks: int) -> bool:
        limits = self._limits
        fills_memory = limits.low_blocks is not None and num_blocks >= limits.low_blocks
        return not following.is_aligned or (num_running < limits.low_running and not fills_memory)

    def _should_mix(self, members: list[Candidate], num_running: int) -> bool:
        if self._is_mixing_cheaper is None or num_running == 0 or self.running_id == NO_BATCH:
            return False
        return self._is_mixing_cheaper([candidate.context_len for candidate in members])

    def _begin(self, following: WaitingBatch) -> None:
        del self._waiting[following.batch_id]
        self.version += 1

    def _take_up(self, following: WaitingBatch, members: list[Candidate], num_running: int) -> None:
        self._begin(following)
        is_full = following.num_requests >= self._limits.min_requests
        if num_running == 0 or (following.is_aligned and is_full):
            self.running_id, self.is_aligned = following.batch_id, following.is_aligned
            self.is_switching = num_running > 0
            return
        self.is_aligned = False
        self._join(members)

    def _join(self, members: list[Candidate]) -> None:
        for candidate in members:
            candidate.batch_id = self.running_id

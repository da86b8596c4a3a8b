"""Messages' parts that say what workers measured: how fast they are, and the totals of their iteration logs."""

from typing import Annotated, Any

import msgspec

from alignedserve.messages.fields import Seconds

# Upper edges of the histogram of spread (longest context of a batch over its mean); a last bucket has none.
SPREAD_EDGES = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)
_NUM_BUCKETS = len(SPREAD_EDGES) + 1

Total = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
TotalSeconds = Annotated[float, msgspec.Meta(ge=0.0)]
SpreadCounts = Annotated[tuple[Total, ...], msgspec.Meta(min_length=_NUM_BUCKETS, max_length=_NUM_BUCKETS)]


class WorkerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a worker needs with nothing else to do; 0: it did not measure. Default objectives follow from it."""

    short_prompt_s: Seconds = 0.0  # of 64 tokens: no first token comes sooner
    prompt_s: Seconds = 0.0  # of 1 024 tokens, or half of what its memory holds
    token_s: Seconds = 0.0  # of one request: no gap is shorter
    shared_token_s: Seconds = 0.0  # of four together

    def slower(self, other: "WorkerSpeed") -> "WorkerSpeed":
        """Return the longer of each of the times."""
        return WorkerSpeed(
            max(self.short_prompt_s, other.short_prompt_s),
            max(self.prompt_s, other.prompt_s),
            max(self.token_s, other.token_s),
            max(self.shared_token_s, other.shared_token_s),
        )


class IterationLogTotals(msgspec.Struct, frozen=True, array_like=True):
    """Sums over decode iterations: a worker reports its gain, the router the sum of all.

    The seven parts add up to the wall time, except for unmeasured gaps.
    """

    num_iterations: Total = 0
    num_switch_iterations: Total = 0  # of those, in which two batches mixed
    num_requests: Total = 0  # running requests, counted again in every iteration
    wall_s: TotalSeconds = 0.0  # from the end of one iteration to the end of the next
    nothing_to_do_s: TotalSeconds = 0.0  # first part: no requests
    waiting_for_prefill_s: TotalSeconds = 0.0  # second: requests, none granted to this worker yet
    prefetch_not_ready_s: TotalSeconds = 0.0  # third: granted, not yet loaded
    turnaround_s: TotalSeconds = 0.0  # fourth: deciding, and the way to the computing thread and back
    prepare_s: TotalSeconds = 0.0  # fifth
    forward_s: TotalSeconds = 0.0  # sixth
    sampling_s: TotalSeconds = 0.0  # seventh
    misaligned_s: TotalSeconds = 0.0  # of forward_s: attention that stragglers cost
    sum_of_spreads: TotalSeconds = 0.0
    spread_counts: SpreadCounts = (0,) * _NUM_BUCKETS  # iterations by spread, one bucket for each edge and the last
    num_ahead_iterations: Total = 0  # that were launched before the tokens of the one before were known
    # Where interference is bounded, of iterations in gaps of real-time requests: of their part alone by the cost model,
    # and as they were.
    real_time_alone_s: TotalSeconds = 0.0
    real_time_beside_s: TotalSeconds = 0.0
    sum_of_straggler_shares: TotalSeconds = 0.0  # of each iteration's decode attention, from 0 to 1
    # Iterations that ran within another, whose pass stood still meanwhile; and until it did, added up.
    num_yields: Total = 0
    yielded_s: TotalSeconds = 0.0
    stopping_s: TotalSeconds = 0.0

    @property
    def straggler_share(self) -> float:
        """Return the share of decode attention that stragglers cost, in the mean of iterations."""
        return self.sum_of_straggler_shares / max(self.num_iterations, 1)

    def plus(self, other: "IterationLogTotals") -> "IterationLogTotals":
        """Add both totals."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        sums: dict[str, Any] = {name: ours[name] + theirs[name] for name in ours if name != "spread_counts"}
        pairs = zip(self.spread_counts, other.spread_counts, strict=True)
        return IterationLogTotals(**sums, spread_counts=tuple(mine + yours for mine, yours in pairs))

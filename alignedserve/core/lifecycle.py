"""The stages of a request and the only steps between them."""

import enum


class Stage(enum.Enum):
    """Where a request is, as the router sees it."""

    QUEUED = "queued"  # waits in the router
    PREFILLING = "prefilling"  # handed to a prefill worker
    POOLED = "pooled"  # its blocks lie in the KV pool
    DECODING = "decoding"  # granted to a decode worker
    FINISHED = "finished"
    ABORTED = "aborted"  # the client gave up
    FAILED = "failed"  # we gave up


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.PREFILLING, Stage.ABORTED, Stage.FAILED}),
    # A prefill worker that dies, or a pool that loses the blocks, sends the request back to the queue.
    Stage.PREFILLING: frozenset(
        {Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.FINISHED, Stage.ABORTED, Stage.FAILED}
    ),
    Stage.POOLED: frozenset({Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.ABORTED, Stage.FAILED}),
    # Evicted to the pool (and, when that word is late, already with another worker), preempted (recompute), or done.
    Stage.DECODING: frozenset(
        {Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.FINISHED, Stage.ABORTED, Stage.FAILED}
    ),
    Stage.FINISHED: frozenset(),
    Stage.ABORTED: frozenset(),
    Stage.FAILED: frozenset(),
}


def advance(current: Stage, following: Stage) -> Stage:
    """Return `following`, or fail: an illegal step is a broken invariant of ours."""
    assert following in TRANSITIONS[current], f"illegal step {current.name} -> {following.name}"
    return following


def is_terminal(stage: Stage) -> bool:
    """Whether a request in this stage holds nothing any more."""
    return not TRANSITIONS[stage]

"""The stages of a request and the legal transitions between them."""

import enum


class Stage(enum.Enum):
    """Stage of a request as the router sees it."""

    QUEUED = "queued"  # waiting in the router
    PREFILLING = "prefilling"  # handed to a prefill worker
    POOLED = "pooled"  # its blocks are in the KV pool
    DECODING = "decoding"  # granted to a decode worker
    FINISHED = "finished"
    ABORTED = "aborted"  # by the client
    FAILED = "failed"  # by the server


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    # A worker that went on decoding while it had no router keeps the request.
    Stage.QUEUED: frozenset({Stage.PREFILLING, Stage.DECODING, Stage.ABORTED, Stage.FAILED}),
    # A prefill worker that dies, or a pool that loses the blocks, sends the request back to the queue.
    Stage.PREFILLING: frozenset(
        {Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.FINISHED, Stage.ABORTED, Stage.FAILED}
    ),
    Stage.POOLED: frozenset({Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.ABORTED, Stage.FAILED}),
    # Evicted to the pool (or, if that message is late, granted to another worker already), preempted, or done.
    Stage.DECODING: frozenset(
        {Stage.POOLED, Stage.DECODING, Stage.QUEUED, Stage.FINISHED, Stage.ABORTED, Stage.FAILED}
    ),
    Stage.FINISHED: frozenset(),
    Stage.ABORTED: frozenset(),
    Stage.FAILED: frozenset(),
}


def advance(current: Stage, following: Stage) -> Stage:
    """Return `following`; an illegal step is a broken invariant."""
    assert following in TRANSITIONS[current], f"illegal step {current.name} -> {following.name}"
    return following


def is_terminal(stage: Stage) -> bool:
    return not TRANSITIONS[stage]

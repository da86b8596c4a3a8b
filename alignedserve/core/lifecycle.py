"""The stages of a request and the legal transitions between them."""

import enum
from collections.abc import Iterable

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request


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


STEPS_PER_EPOCH = 1 << 16
_UNREPORTED_EPOCHS = 1 << 20  # at most between two reports; 17 minutes, where they follow the clock


def next_epoch(latest: int, now: float) -> int:
    """Return the first number of a new epoch: above `latest`, and the time in milliseconds where that is more.

    A restarted router therefore continues above its predecessor. On another host, or after a reboot,
    the clock may be behind: workers and pools register with the latest number they know, and gateways resume requests
    with the latest that they were told (`latest_attempt` in their messages).
    """
    return max(latest // STEPS_PER_EPOCH + 1, int(now * 1000)) * STEPS_PER_EPOCH


def beyond_unreported(reported: int) -> int:
    """Return a number above all that a lost router can have given out after it last reported its latest."""
    return reported + _UNREPORTED_EPOCHS * STEPS_PER_EPOCH


def is_report_due(latest: int, reported: int) -> bool:
    """Return whether to report the latest number now, and not with the next regular report."""
    return latest - reported > _UNREPORTED_EPOCHS // 2 * STEPS_PER_EPOCH


def next_step(attempt: int) -> int:
    """Return the number under which the next holder has the request."""
    return attempt + 1


def epoch_end(attempt: int) -> int:
    """Return the last number of the epoch; a message with it covers every step."""
    return attempt | (STEPS_PER_EPOCH - 1)


def is_same_epoch(step: int, other: int) -> bool:
    """Return True if both numbers belong to the same epoch."""
    return step // STEPS_PER_EPOCH == other // STEPS_PER_EPOCH


def plan_chunks(remaining: Iterable[tuple[RequestId, int]], budget: int) -> tuple[tuple[RequestId, int], ...]:
    """Split `budget` tokens among requests with tokens left to compute, in order; each takes as many as it can.

    Example: remaining ((a, 700), (b, 40), (c, 9)) and a budget of 720 give ((a, 700), (b, 20)).
    """
    chunks = []
    for request_id, num_tokens in remaining:
        if budget <= 0:
            break
        chunk = min(num_tokens, budget)
        if chunk > 0:
            chunks.append((request_id, chunk))
        budget -= chunk
    return tuple(chunks)


def end_token_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end the answer early; reaching `max_tokens` also ends it.

    Under a grammar an end token that is to be ignored comes only where nothing else may follow.
    """
    sampling = request.sampling
    ignores_eos = sampling.ignore_eos and not sampling.grammar
    return frozenset(sampling.stop_token_ids) if ignores_eos else eos_token_ids.union(sampling.stop_token_ids)

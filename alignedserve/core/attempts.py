"""Attempt numbers: the attempt at a request that a message belongs to; older attempts are ignored.

Links are independent, so a message about a request can arrive after the request has moved on. Each time the router
dispatches a request it begins a new *epoch*; each handoff within the epoch (pool to decode worker, decode worker back
to the pool) raises the number by one *step*. So the larger number is always the later state. Example: the router
dispatches 3 * STEPS_PER_EPOCH; the pool takes the request with step 1, a decode worker holds it with step 2.
"""

STEPS_PER_EPOCH = 1 << 16


def next_epoch(latest: int, now: float) -> int:
    """Return the first number of a new epoch, above `latest` and above all numbers of an earlier router process.

    `now` in seconds on a clock that does not go back between routers of one host.
    """
    return max(latest // STEPS_PER_EPOCH + 1, int(now * 1000)) * STEPS_PER_EPOCH


def next_step(attempt: int) -> int:
    """Return the number under which the next holder has the request."""
    return attempt + 1


def epoch_end(attempt: int) -> int:
    """Return the last number of the epoch; a message with it covers every step."""
    return attempt | (STEPS_PER_EPOCH - 1)


def is_same_epoch(one: int, other: int) -> bool:
    """Return True if both numbers belong to the same epoch."""
    return one // STEPS_PER_EPOCH == other // STEPS_PER_EPOCH

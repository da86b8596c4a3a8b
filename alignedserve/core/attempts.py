"""Attempt numbers: which giving-out of a request a message is about, and how far along it the request had come.

Links are independent, so word of a request can arrive after the request has moved on. Every time the router gives a
request out it begins a new *life*; whoever passes the request on within that life (pool to decode worker, decode
worker back to the pool) raises the number by one *step*. So a larger number is always the later word. Example: the
router gives out 3 * STEPS_PER_EPOCH; the pool takes it with step 1, a decode worker has it with step 2.
"""

STEPS_PER_EPOCH = 1 << 16


def next_epoch(latest: int, now: float) -> int:
    """The number of a new giving-out: above `latest`, and above all that a router before this one gave out.

    `now` in seconds on a clock that does not go back between routers of one host.
    """
    return max(latest // STEPS_PER_EPOCH + 1, int(now * 1000)) * STEPS_PER_EPOCH


def next_step(attempt: int) -> int:
    """The number under which the next holder has it."""
    return attempt + 1


def epoch_end(attempt: int) -> int:
    """The last number of this life: to end it wherever it has got to."""
    return attempt | (STEPS_PER_EPOCH - 1)


def is_same_epoch(one: int, other: int) -> bool:
    """Whether both are of one giving-out."""
    return one // STEPS_PER_EPOCH == other // STEPS_PER_EPOCH

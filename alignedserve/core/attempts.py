"""Attempt numbers: the attempt at a request that a message belongs to; older attempts are ignored.

Links are independent, so a message about a request can arrive after the request has moved on. Each time the router
dispatches a request it begins a new *epoch*; each handoff within the epoch (pool to decode worker, decode worker back
to the pool) raises the number by one *step*. So the larger number is always the later state. Example: the router
dispatches 3 * STEPS_PER_EPOCH; the pool takes the request with step 1, a decode worker holds it with step 2.
"""

STEPS_PER_EPOCH = 1 << 16
_UNREPORTED_EPOCHS = 1 << 20  # at most between two reports; 17 minutes, where they follow the clock


def next_epoch(latest: int, now: float) -> int:
    """Return the first number of a new epoch: above `latest`, and the time in milliseconds where that is more.

    So a router that is started again on its host goes on above the one before it. On another host, or after a reboot,
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


def is_same_epoch(one: int, other: int) -> bool:
    """Return True if both numbers belong to the same epoch."""
    return one // STEPS_PER_EPOCH == other // STEPS_PER_EPOCH

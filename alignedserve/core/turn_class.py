"""The classes of requests that wait for their turn, in their order, the same wherever requests wait.

In the queue of the router, in the pool's batches, and for places of prefill and decode workers: real-time requests that
can still hold their objective go first, then late ones, then best-effort ones. What a later class has beside earlier
ones is in alignedserve/core/class_floor.py. Where a policy knows no classes, all requests are of the first.
"""

from enum import IntEnum


class TurnClass(IntEnum):
    """Classes, the first ones first."""

    ON_TIME = 0  # real-time
    LATE = 1  # real-time, which has missed its objective, or has none
    BEST_EFFORT = 2

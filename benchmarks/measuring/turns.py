"""Works that take turns, so that a load that changes meets all of them."""

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]


def seconds_by_turns(
    num_rounds: int, *works: Work, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Time synchronous works by the host's clock, in turns; return the seconds of each, without a warm-up round."""
    rounds = []
    for _ in range(num_rounds + 1):
        seen = []
        for work in works:
            started = clock()
            work()
            seen.append(clock() - started)
        rounds.append(seen)
    return [list(seen) for seen in zip(*rounds[1:], strict=True)]


def medians_by_turns(num_rounds: int, *works: Work) -> list[float]:
    return [statistics.median(seen) for seen in seconds_by_turns(num_rounds, *works)]

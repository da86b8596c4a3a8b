"""Late prompts at workers: they wait for prompts that are on time, and none of these waits for them."""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from router.state import DispatchedPrefill


class GivenPrompt(NamedTuple):
    """A prompt that a worker was given; in the order of the times from which they are late."""

    due_s: float
    request_id: RequestId
    attempt: int
    worker: str


class LatePrompts:
    """Tells, once, which of the prompts given to workers have become late. Those that ended are told as well."""

    def __init__(self) -> None:
        self._given: list[GivenPrompt] = []  # a heap

    def __len__(self) -> int:
        return len(self._given)

    def add(self, worker: str, request_id: RequestId, prefill: DispatchedPrefill) -> None:
        """Add a prompt that a worker is given, unless it is never late."""
        if prefill.is_real_time and prefill.due_s < math.inf:
            heapq.heappush(self._given, GivenPrompt(prefill.due_s, request_id, prefill.attempt, worker))

    def take(self, now: float) -> Iterator[GivenPrompt]:
        while self._given and self._given[0].due_s <= now:
            yield heapq.heappop(self._given)

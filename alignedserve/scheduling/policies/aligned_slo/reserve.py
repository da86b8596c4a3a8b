"""The reserve of chat: what documents leave of the time by which chats are ahead of their mean gap.

A prompt that is in time only in one go prolongs one gap of every chat beside it, and each has to be ahead by that much.
Documents that fill every gap up to its objective leave none of them ahead, and the next long prompt is late, or makes
them late. So documents prolong an iteration only as far as every chat that has begun is ahead, after it, by what a
prompt takes; while one is not, they have a small share of the time that is left. Nothing is kept while no two chats
wait and prompts are in time in parts, each beside one token of every chat.

    usual   = what nine of ten of the latest prompts of chat take alone
    reserve = 0 if stretch * usual <= longest, else min(usual, longest)
    until   = max(ahead - reserve, alone + share * (budget - alone))

`longest`: the longest prompt that could be in time. `stretch`: times as long as alone that one takes in parts;
infinite while two chats wait.
`ahead`: time until the first of the next tokens is due by mean gaps. `alone`: the iteration without documents.
Example: chats have a mean gap of 50 ms, the prompts take 400 ms. Alone iterations take 20 ms. A chat that has just
begun is ahead by 400 ms after 13 tokens: until then documents prolong iterations by 2 to 3 ms, after it by 25.
"""

import math
from collections import deque

import numpy as np

from alignedserve.scheduling.runtime_estimate import PrefillTimes
from alignedserve.scheduling.table import RequestTable

_NUM_PROMPTS = 64
_COVERED = 0.9  # of them


class PromptReserve:
    """Knows how long the latest prompts of chat take."""

    def __init__(self, share: float) -> None:
        """`share`: of the time left that documents have while a chat is not ahead enough; 1: nothing is kept."""
        self._share = share
        self._latest_s: deque[float] = deque(maxlen=_NUM_PROMPTS)
        self._num_seen = 0  # requests that have come to the worker
        self._usual_s = 0.0

    def note(self, table: RequestTable, prompts: PrefillTimes) -> None:
        """Note prompts that have come: real-time ones with an objective for their first token."""
        if table.num_added == self._num_seen:
            return
        has_come = table.is_real_time & (table.order >= self._num_seen)
        rows = np.flatnonzero(has_come & (table.num_generated == 0) & np.isfinite(table.ttft_s))
        self._num_seen = table.num_added
        if len(rows):
            self._latest_s.extend(prompts.of(table.num_remaining[rows]).tolist())
            self._usual_s = sorted(self._latest_s)[math.ceil(_COVERED * len(self._latest_s)) - 1]

    def until_s(self, ahead_s: float, *, alone_s: float, budget_s: float, longest_s: float, stretch: float) -> float:
        """Return how long the iteration may be with documents, of `budget_s`.

        `ahead_s`: time until a chat's next token is due by its mean gap. `alone_s`: of the iteration without documents.
        `longest_s`: the longest prompt that can be in time. `stretch`: times as long as alone that it takes in parts.
        """
        if not self._usual_s or self._usual_s * stretch <= longest_s:
            return budget_s
        kept_s = min(self._usual_s, longest_s)
        least_s = alone_s + self._share * max(budget_s - alone_s, 0.0)
        return min(max(ahead_s - kept_s, least_s), budget_s)

"""The floor of a class: its share of the tokens while requests of earlier classes wait, and nothing beyond.

Best-effort requests have one beside real-time ones; and overdue real-time ones have one beside
those that can still be in time, or a lasting overload would keep them waiting until their clients have gone.

Example: the share is 5 %. A document of 1 000 tokens waits while chat keeps a queue filled. Each token of chat that
goes owes the document 0.05 / 0.95 tokens: it is due after 19 000 tokens of chat.
So the tokens that go before a real-time request are at most those of the real-time requests before it, `r`, and for
each floor `r * share / (1 - share)` and one request of its class.
"""

import math
from enum import IntEnum

from alignedserve.core.request import Request

# A real-time request is overdue when it has waited so many times its objective, and so many times what others waited of
# late: the tail follows the median. It then has this share.
OVERDUE_TIMES, OVERDUE_FLOOR = 2.0, 0.05
_WEIGHT = 1 / 16  # of the latest in a moving average


def turn_due_s(request: Request, *, has_begun: bool) -> float:
    """Return the time from which a real-time request is late where it waits for its turn.

    Deadline of the first token; infinite once the token is out, and where objectives name none. One without any
    objective is always late.
    """
    if not has_begun and not request.slo.targets:
        return -math.inf
    ttft_s = request.slo.ttft_s
    return math.inf if has_begun or ttft_s is None else request.arrival_s + ttft_s


class ClassFloor:
    """Counts the tokens, or the seconds, that a class may have before the requests of earlier classes that wait."""

    def __init__(self, share: float) -> None:
        """`share`: at least 0 and below 1."""
        self.owed_share = share / (1.0 - share)  # for each token of an earlier class
        self.owed = 0.0

    def is_due(self, num_tokens: float) -> bool:
        """Return whether a request of the class, of so many tokens, may go before earlier classes."""
        return self.owed >= num_tokens

    def note_earlier(self, num_tokens: float, next_tokens: float) -> None:
        """Note a request of an earlier class that goes while the next of this one, of `next_tokens`, waits.

        Never more than one request's worth is owed: what could not go meanwhile does not come in a burst.
        """
        self.owed = min(self.owed + self.owed_share * num_tokens, next_tokens)

    def note_own(self, num_tokens: float) -> None:
        """Note a request of the class that goes."""
        self.owed = max(self.owed - num_tokens, 0.0)


class OverdueFloor(ClassFloor):
    """The floor of late real-time requests before those on time, which only overdue ones have.

    What others wait is a moving average, as in the policy that plans iterations (aligned_slo).
    """

    def __init__(self) -> None:
        super().__init__(OVERDUE_FLOOR)
        self._wait_s = 0.0  # of late

    def note_wait(self, wait_s: float) -> None:
        """Note how long a real-time request has waited that goes."""
        self._wait_s += _WEIGHT * (wait_s - self._wait_s)

    def lets(self, num_tokens: int, since_s: float, due_s: float, now: float) -> bool:
        """Return whether a request of so many tokens, which waits since `since_s`, may go before those on time."""
        patience_s = OVERDUE_TIMES * max(due_s - since_s, self._wait_s)
        return now - since_s >= patience_s and self.is_due(num_tokens)


class TurnClass(IntEnum):
    """Classes, the first ones first."""

    ON_TIME = 0  # real-time
    LATE = 1  # real-time, which has missed its objective, or has none
    BEST_EFFORT = 2

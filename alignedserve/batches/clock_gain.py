"""How much the wall clock may have gained on time that has passed: it is set forward, and back, by who corrects it.

What is removed cannot be had again, so that it goes by time that has passed. A wall clock that was set an hour forward
makes an upload that began a second ago look an hour old, and so does one that was set back and forward again.
"""


class ClockGain:
    """Watches the wall clock beside a monotonic one, of which it may be any time ahead."""

    def __init__(self) -> None:
        self._least_ahead_s = float("inf")

    def look(self, wall_s: float, now: float) -> float:
        """Return by how much the age of anything may be too high now that was dated since the first look.

        Time in which this host slept counts as gained, as no monotonic clock has it.
        """
        ahead_s = wall_s - now
        self._least_ahead_s = min(self._least_ahead_s, ahead_s)
        return ahead_s - self._least_ahead_s

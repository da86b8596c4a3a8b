"""How much the wall clock may have gained on the time that has passed: somebody may set it forward or back.

Nothing that was removed comes back, so removal goes by the time that has passed. A wall clock that was set an hour
forward makes an upload of a second ago look an hour old, and so does a clock that was set back and forward again.
"""


class ClockGain:
    """Watches the wall clock beside a monotonic one; the distance between them may be any."""

    def __init__(self) -> None:
        self._least_ahead_s = float("inf")

    def look(self, wall_s: float, now: float) -> float:
        """Return by how much the age of anything dated since the first look may be too high.

        Time in which this host slept counts as gained, as no monotonic clock has it.
        """
        ahead_s = wall_s - now
        self._least_ahead_s = min(self._least_ahead_s, ahead_s)
        return ahead_s - self._least_ahead_s

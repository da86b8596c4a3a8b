"""Computing time that the grammars of each client have taken in this process."""

CLIENT_S = 30.0  # of a core, at once
_FORGIVEN = 0.25  # of them for each second that passes


class ClientSeconds:
    """Seconds of a core that grammars of each client have taken; a share of them is forgiven with time."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[float, float]] = {}  # by client: seconds, and when they were that many

    def add(self, client: str, seconds: float, now: float) -> bool:
        """Count these, too; return whether the client has some left."""
        taken, at = self._taken.pop(client, (0.0, now))
        taken = max(taken - _FORGIVEN * (now - at), 0.0) + seconds
        self._taken[client] = (taken, now)
        oldest, (of_oldest, then) = next(iter(self._taken.items()))
        if of_oldest <= _FORGIVEN * (now - then):
            del self._taken[oldest]
        return taken <= CLIENT_S

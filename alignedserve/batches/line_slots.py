"""How many lines may be in the cluster at a time: for each model twice as many as its workers run together.

Workers and models come and go, so places are counted whenever lines are to be started. A batch whose lines name several
models takes places of each in proportion to its lines. Example: there are places for 16 lines of A and 4 of B, and the
batch has three lines of A for every line of B. Then 16 of its lines may run, and 4 of these are expected to be of B.
While B has no worker, none of its lines start, and 16 of A may run.
"""

from collections.abc import Mapping

_MARGIN = 2  # lines for each request that workers run: the next one is there when one ends
_UNKNOWN_PLACES = 8  # of a model whose workers are not known yet, or that is served no more: its lines fail
_LEAST_SHARE = 1e-9

ModelShares = Mapping[str, float]  # parts of a batch's lines by the model that runs them; they add up to 1


class LineSlots:
    """Free places for lines, by model and, where the configuration says so, in all."""

    def __init__(self, num_places: Mapping[str, int], max_in_flight: int | None = None) -> None:
        """`num_places`: requests that each model's workers run together. `max_in_flight`: bounds lines instead."""
        self._num_places = num_places
        self._total = max_in_flight
        none = (model for model, count in num_places.items() if not count)
        self.closed = frozenset[str](none if max_in_flight is None else ())  # models of which no line starts now
        self._num_taken: dict[str, float] = {}
        self._num_taken_in_all = 0

    def limit(self, model: str) -> int:
        """Return the lines of this model that may be in the cluster at a time."""
        return self._total if self._total is not None else _MARGIN * self._num_places.get(model, _UNKNOWN_PLACES)

    def take(self, shares: ModelShares, count: int) -> None:
        """Take places for lines of one batch, whether they are free or not."""
        self._num_taken_in_all += count
        for model, share in self._open(shares).items():
            self._num_taken[model] = self._num_taken.get(model, 0.0) + share * count

    def num_free(self, shares: ModelShares) -> int:
        if self._total is not None:
            return max(self._total - self._num_taken_in_all, 0)
        free = (
            (self.limit(model) - self._num_taken.get(model, 0.0)) / max(share, _LEAST_SHARE)
            for model, share in self._open(shares).items()
        )
        return max(int(min(free, default=0.0) + _LEAST_SHARE), 0)

    def _open(self, shares: ModelShares) -> ModelShares:
        if self.closed.isdisjoint(shares):
            return shares
        found = {model: share for model, share in shares.items() if model not in self.closed}
        whole = sum(found.values())
        return {model: share / whole for model, share in found.items()} if whole else shares

"""Order of batches by slack, and deadlines of their lines.

Slack of a batch is the time left in its window less the time that its remaining lines take at the present rate. The
batch with the least slack goes first. Example: A has 3 600 s left and 2 000 s of work, B 600 s and 100 s of work: A's
slack is 1 600 s and B's 500 s, so B goes first. A waits within its slack and loses nothing.

Where batches of several owners have lines to run, the owner with the fewest lines in the cluster by its weight goes
first, and of its batches the one with the least slack. So each owner has lines waiting at the router, which shares
tokens out (core/fair_shares.py). Example: 12 places, owners of weights 2 and 1: 8 lines and 4. A client counts once,
whichever APIs its batches come by.

Line deadlines spread the remaining lines over the window, so that a batch asks for a steady share of the cluster
instead of nothing at first and everything at the end: the k-th of n lines in flight gets `k / n_left` of the time left,
but at least four times the mean duration of its model's lines. Example: 24 h left, 50 000 lines: the 64th in flight has
110 s."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from alignedserve.batches.records import client_of

_WINDOW = 64.0  # observations that weigh in a running mean
_FIRST_LINE_S = 10.0  # assumed duration before a line has ended
_MAX_MODELS = 256  # whose durations are known: names that no model has any more are forgotten
_PATIENCE = 4.0  # least deadline, in mean durations
_MARGIN = 0.95  # of the time left; the rest is for writing and for what was not foreseen


class ReadyBatch(NamedTuple):
    """A batch that has lines to run."""

    position: int  # in the caller's list
    expires_s: float
    work_s: float  # duration of its remaining lines
    created_s: float


class MeanLineDuration:
    """Running mean of the time that lines spend in the cluster."""

    def __init__(self) -> None:
        self.mean_s = _FIRST_LINE_S
        self._num_ended = 0

    def add(self, duration_s: float) -> None:
        self._num_ended += 1
        weight = max(1.0 / _WINDOW, 1.0 / (self._num_ended + 1))
        self.mean_s += (duration_s - self.mean_s) * weight


class LineDurations:
    """Mean durations of lines by model, so that the lines of a slow model get enough time."""

    def __init__(self) -> None:
        self._by_model: dict[str, MeanLineDuration] = {}

    def add(self, model: str, duration_s: float) -> None:
        known = self._by_model.pop(model, None) or MeanLineDuration()
        known.add(duration_s)
        self._by_model[model] = known  # the latest is last
        if len(self._by_model) > _MAX_MODELS:
            del self._by_model[next(iter(self._by_model))]

    def mean_s(self, model: str) -> float:
        """Return the mean of this model, or an assumed one before its first line has ended."""
        known = self._by_model.get(model)
        return known.mean_s if known is not None else _FIRST_LINE_S


def by_slack(batches: Iterable[ReadyBatch], now: float) -> list[int]:
    """Return the positions of the batches, the one with the least slack first."""
    ordered = sorted(batches, key=lambda batch: (batch.expires_s - now - batch.work_s, batch.created_s, batch.position))
    return [batch.position for batch in ordered]


def owner_turns(
    num_in_flight: Mapping[str, int], weight_of: Callable[[str], float], start: Callable[[str], bool]
) -> Iterator[str]:
    """Start lines one by one, each of the owner with the fewest in flight by its weight; yield the owner of each.

    `num_in_flight`: of owners that may have lines to start; ties go in their order. `start`: of this owner; False: it
    can start none, and is not asked again."""
    turns = [
        (count / weight_of(owner), index, count, owner) for index, (owner, count) in enumerate(num_in_flight.items())
    ]
    heapq.heapify(turns)
    while turns:
        _, index, count, owner = heapq.heappop(turns)
        if start(owner):
            yield owner
            heapq.heappush(turns, ((count + 1) / weight_of(owner), index, count + 1, owner))


def client_turns(
    owners: Sequence[str],
    num_in_flight: Mapping[str, int],
    weight_of: Callable[[str], float],
    start: Callable[[str], bool],
) -> Iterator[str]:
    """Start lines one by one as `owner_turns` does, where one client may be several owners (records.py): they share the
    turns of one, each with as many lines as the others.

    `owners`: that may have lines to start. `num_in_flight`: of all owners."""
    of_client: dict[str, list[str]] = {}
    for owner in owners:
        of_client.setdefault(client_of(owner), []).append(owner)
    of_owner, of_clients = Counter(num_in_flight), dict.fromkeys(of_client, 0)
    for owner, count in num_in_flight.items():
        if client_of(owner) in of_clients:
            of_clients[client_of(owner)] += count

    def start_one(client: str) -> bool:
        able = of_client[client]
        while able:
            owner = min(able, key=of_owner.__getitem__)
            if start(owner):
                of_owner[owner] += 1
                return True
            able.remove(owner)
        return False

    return owner_turns(of_clients, weight_of, start_one)


def line_deadline_s(time_left_s: float, position: int, num_left: int, line_s: float) -> float:
    """Return the seconds that the `position`-th line in flight (from 1) of `num_left` may take."""
    paced_s = _MARGIN * time_left_s * position / max(num_left, 1)
    return max(0.001, min(time_left_s, max(paced_s, _PATIENCE * line_s)))


_SLOT_MARGIN = 2  # lines for each request that workers run: the next one is there when one ends
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
        return self._total if self._total is not None else _SLOT_MARGIN * self._num_places.get(model, _UNKNOWN_PLACES)

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
        open_shares = {model: share for model, share in shares.items() if model not in self.closed}
        whole = sum(open_shares.values())
        return {model: share / whole for model, share in open_shares.items()} if whole else shares

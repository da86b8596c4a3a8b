"""Requests for a pool, of the lengths of a recorded trace or made up: what the scheduling benchmark fills it with."""

import itertools
import random
from collections.abc import Callable, Iterator

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.workload.traces import shipped_trace
from kvpool.state import PooledRequest

_LONGEST = 65536
_MAX_DRAWS = 1000


def _azure(rng: random.Random) -> Iterator[int]:
    rows = shipped_trace()
    while True:
        row = rng.choice(rows)
        yield row.prompt_len + rng.randint(0, row.output_len)


def _lognormal(rng: random.Random) -> Iterator[int]:
    """Draw lengths of median 665 tokens, 95 % under 4 060."""
    while True:
        yield min(max(int(rng.lognormvariate(6.5, 1.1)), 1), _LONGEST)


def _uniform(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.randint(1, _LONGEST)


def _one(rng: random.Random) -> Iterator[int]:
    return itertools.repeat(700)


LENGTHS: dict[str, Callable[[random.Random], Iterator[int]]] = {
    "azure": _azure,
    "lognormal": _lognormal,
    "uniform": _uniform,
    "one": _one,
}


class Arrivals:
    """Requests without end, each later than the one before, and none larger than `max_blocks`.

    First come, first served would stop at one that no batch can hold. Raises ConfigError where there are no others.
    """

    def __init__(self, lengths: str, block_size: int, max_blocks: int, seed: int) -> None:
        self._name = lengths
        self._block_size = block_size
        self._max_len = max_blocks * block_size
        self._lengths = LENGTHS[lengths](random.Random(seed))  # noqa: S311  (nothing secret)
        self._numbers = itertools.count()

    def take(self, count: int) -> list[PooledRequest]:
        """Return the next ones."""
        return [self._make(number) for number in itertools.islice(self._numbers, count)]

    def _make(self, number: int) -> PooledRequest:
        lengths = itertools.islice(self._lengths, _MAX_DRAWS)
        context_len = next((length for length in lengths if length <= self._max_len), None)
        if context_len is None:
            raise ConfigError(f"lengths {self._name!r}: none of {_MAX_DRAWS} is {self._max_len} tokens or less.")
        num_blocks = blocks_for(context_len, self._block_size)
        return PooledRequest(RequestId(f"request-{number:08d}"), context_len, num_blocks, number * 1e-5, None)

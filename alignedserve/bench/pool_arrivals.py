"""Requests for a pool, of the lengths of a recorded trace or made up: what the scheduling benchmark fills it with."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from alignedserve.bench.traces import read_trace
from alignedserve.core.blocks import blocks_for
from alignedserve.core.ids import RequestId
from kvpool.state import PooledRequest

SHIPPED_TRACE = Path(__file__).parent / "traces" / "azure_conv_slice.csv"
_LONGEST = 65536


def _azure(rng: random.Random) -> Iterator[int]:
    rows = read_trace(SHIPPED_TRACE)
    while True:
        row = rng.choice(rows)
        yield row.prompt_len + rng.randint(0, row.output_len)


def _lognormal(rng: random.Random) -> Iterator[int]:
    """Median 665 tokens, 95 % under 4 060."""
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
    """Requests without end, each later than the one before."""

    def __init__(self, lengths: str, block_size: int, seed: int) -> None:
        self._block_size = block_size
        self._lengths = LENGTHS[lengths](random.Random(seed))  # noqa: S311  (nothing secret)
        self._numbers = itertools.count()

    def take(self, count: int) -> list[PooledRequest]:
        """The next ones."""
        return [self._make(number) for number in itertools.islice(self._numbers, count)]

    def _make(self, number: int) -> PooledRequest:
        context_len = next(self._lengths)
        num_blocks = blocks_for(context_len, self._block_size)
        return PooledRequest(RequestId(f"request-{number:08d}"), context_len, num_blocks, number * 1e-5, None)

"""Decode attention of a batch with one straggler, on this machine's cores: what does the longest context cost?

A batch of equal contexts but for one, 2, 8 or 32 times as long, beside a batch of as many tokens in equal contexts, by
two schedules: contexts divided into sections, as our kernels do, and one task for each sequence and head of keys, as
kernels with one block of threads per sequence do. Threads take one task after another; the straggler is the first of
them, or the last. Beside each measured ratio is that of the list schedule (alignedserve/costmodel/list_schedule.py).

    python -m benchmarks.stragglers
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from alignedserve.costmodel.list_schedule import SECTION, list_schedule
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import PagedAttention

BLOCK_SIZE, HEAD_DIM = 16, 64
SHORT, NUM_SEQUENCES = 512, 8  # tokens of a context that is no straggler; sequences of a batch
FACTORS = (2, 8, 32)
HEADS = (1, 4)
PIECES = ((1, 32768), (64, 512), (512, 64))  # contexts and their tokens, all of one sum: what does a piece cost?


class Batch(NamedTuple):
    """Contexts with blocks of their own, one storage with all heads and one for each."""

    lengths: tuple[int, ...]
    num_heads: int

    def divided(self, num_threads: int) -> Callable[[], None]:
        """Return the pass of our kernel: sections of all contexts, taken by its threads."""
        attention, tables = self._storage(self.num_heads)
        rows, lengths = np.arange(len(self.lengths)), np.array(self.lengths)
        plan = attention.plan_decode(tables, rows, lengths, None, num_threads)
        queries = torch.rand(len(self.lengths), self.num_heads, 1, HEAD_DIM)
        out = torch.empty_like(queries)
        return lambda: attention.run(plan, queries, out, 0, False)

    def undivided(self, helpers: ThreadPoolExecutor, num_threads: int) -> Callable[[], None]:
        """Return a pass of one task for each sequence and head, taken by threads in that order."""
        tasks = []
        storages = [self._storage(1) for _ in range(self.num_heads)]
        for row, length in enumerate(self.lengths):
            for attention, tables in storages:
                plan = attention.plan_decode(tables, np.array([row]), np.array([length]), None, 1)
                queries = torch.rand(1, 1, 1, HEAD_DIM)
                tasks.append((attention, plan, queries, torch.empty_like(queries), tables))
        return _Crew(tasks, helpers, num_threads).work

    def tasks(self, *, is_divided: bool) -> list[int]:
        """Return the tokens of every task, as a list schedule takes them."""
        part = SECTION if is_divided else max(self.lengths)
        found = [min(part, length - first) for length in self.lengths for first in range(0, length, part)]
        return [tokens for tokens in found for _ in range(self.num_heads)]

    def _storage(self, num_heads: int) -> tuple[PagedAttention, Any]:
        blocks_of = [-(-length // BLOCK_SIZE) for length in self.lengths]
        blocks = torch.rand(sum(blocks_of), 1, 2, BLOCK_SIZE, num_heads, HEAD_DIM)
        tables, first = np.zeros((len(self.lengths), max(blocks_of)), np.int64), 0
        for row, num_blocks in enumerate(blocks_of):
            tables[row, :num_blocks] = np.arange(first, first + num_blocks)
            first += num_blocks
        return PagedAttention(blocks, group=1, level=supported_levels()[0]), tables


class _Crew:
    """Threads that take the tasks of a pass one after another."""

    def __init__(self, tasks: Sequence[Any], helpers: ThreadPoolExecutor, num_threads: int) -> None:
        self._tasks, self._helpers, self._num_threads = tasks, helpers, num_threads

    def work(self) -> None:
        """Do all tasks."""
        taken = count()
        helping = [self._helpers.submit(self._take, taken) for _ in range(self._num_threads - 1)]
        self._take(taken)
        for one in helping:
            one.result()

    def _take(self, taken: Iterator[int]) -> None:
        while (number := next(taken)) < len(self._tasks):
            attention, plan, queries, out, _ = self._tasks[number]
            attention.run(plan, queries, out, 0, False)


def seconds_of(passes: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Return the least time of each pass, which are taken in turns: what neighbours disturbed does not count."""
    least = [float("inf")] * len(passes)
    for _ in range(rounds):
        for number, one in enumerate(passes):
            began = time.perf_counter()
            one()
            least[number] = min(least[number], time.perf_counter() - began)
    return least


def straggler(factor: int, num_heads: int, *, is_divided: bool, num_threads: int, rounds: int) -> dict[str, Any]:
    """Measure one batch, the straggler first and last, against equal lengths."""
    others = (SHORT,) * (NUM_SEQUENCES - 1)
    total = sum(others) + factor * SHORT
    equal = Batch((total // NUM_SEQUENCES,) * NUM_SEQUENCES, num_heads)
    orders = Batch((factor * SHORT, *others), num_heads), Batch((*others, factor * SHORT), num_heads)
    with ThreadPoolExecutor(num_threads) as helpers:
        made = [
            one.divided(num_threads) if is_divided else one.undivided(helpers, num_threads) for one in (equal, *orders)
        ]
        equal_s, first_s, last_s = seconds_of(made, rounds)
    expected = [list_schedule(one.tasks(is_divided=is_divided), num_threads) for one in (equal, *orders)]
    return {
        "schedule": "sections" if is_divided else "one task per sequence and head",
        "heads": num_heads,
        "times_as_long": factor,
        "equal_ms": round(1e3 * equal_s, 3),
        "first": _beside(first_s / equal_s, expected[1] / expected[0]),
        "last": _beside(last_s / equal_s, expected[2] / expected[0]),
    }


def _beside(measured: float, scheduled: float) -> dict[str, float]:
    return {"measured": round(measured, 3), "list_schedule": round(scheduled, 3)}


def piece_tokens(rounds: int) -> float:
    """Return the tokens that one thread reads in the time that a piece costs beside them: a line through PIECES."""
    made = [Batch((tokens,) * contexts, 1) for contexts, tokens in PIECES]
    seconds = seconds_of([one.divided(1) for one in made], rounds)
    pieces = [len(one.tasks(is_divided=True)) for one in made]
    slope, base = np.polyfit(pieces, seconds, 1)
    return float(slope / (base / (PIECES[0][0] * PIECES[0][1])))


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__, rounds=200, name="kernels/stragglers")
    options = parser.parse_args()
    num_threads = min(os.cpu_count() or 1, 2)
    load = os.getloadavg()[0]
    rows = [
        straggler(factor, heads, is_divided=is_divided, num_threads=num_threads, rounds=options.rounds)
        for is_divided in (True, False)
        for heads in HEADS
        for factor in FACTORS
    ]
    for row in rows:
        print(row)
    figures = {
        "threads": num_threads,
        "load_average": round(statistics.fmean((load, os.getloadavg()[0])), 2),
        "tokens": SHORT,
        "sequences": NUM_SEQUENCES,
        "piece_tokens": round(piece_tokens(options.rounds), 1),
        "stragglers": rows,
    }
    print(figures["piece_tokens"], "tokens could be read in the time that a piece costs")
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()

"""Decode attention of a batch with one straggler, on this machine's cores: what does the longest context cost?

A batch of equal contexts but for one, 2, 8 or 32 times as long, beside a batch of as many tokens in equal contexts, by
two schedules: contexts divided into sections, as our kernels do, and one task for each sequence and head of keys, as
kernels with one block of threads per sequence do. The model has one head of keys.

Every task is timed by itself, by its thread's processor time, which neighbours on the machine do not prolong; the pass
of two threads is the list schedule of these times (lab/costmodel/list_schedule.py), with the straggler first
or last. On a quiet machine our kernel's pass is timed by the clock as well, with all its threads.

    python -m benchmarks.kernels.stragglers
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import PagedAttention
from lab.costmodel.list_schedule import SECTION, list_schedule

BLOCK_SIZE, HEAD_DIM = 16, 64
SHORT, NUM_SEQUENCES = 1024, 8  # tokens of a context that is no straggler; sequences of a batch
FACTORS = (2, 8, 32)
NUM_THREADS = 2
COLD_TOKENS = 1 << 17  # 64 MiB of keys and values, more than caches keep from one pass to the next
PIECES = ((4, 32768), (256, 512), (2048, 64))  # contexts and their tokens, all of one sum: what does a piece cost?


def attention_pass(lengths: Sequence[int], num_threads: int) -> Callable[[], None]:
    """Return the pass of our kernel over contexts of these lengths."""
    blocks_of = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = torch.rand(sum(blocks_of), 1, 2, BLOCK_SIZE, 1, HEAD_DIM)
    tables, first = np.zeros((len(lengths), max(blocks_of)), np.int64), 0
    for row, num_blocks in enumerate(blocks_of):
        tables[row, :num_blocks] = np.arange(first, first + num_blocks)
        first += num_blocks
    attention = PagedAttention(blocks, group=1, level=supported_levels()[0])
    plan = attention.plan_decode(tables, np.arange(len(lengths)), np.array(lengths), None, num_threads)
    queries = torch.rand(len(lengths), 1, 1, HEAD_DIM)
    out = torch.empty_like(queries)
    return lambda: attention.run(plan, queries, out, 0, False)


def least_s(one: Callable[[], None], rounds: int, clock: Callable[[], float]) -> float:
    """Return the least time of a pass by a clock."""
    least = float("inf")
    for _ in range(rounds):
        began = clock()
        one()
        least = min(least, clock() - began)
    return least


class Tasks:
    """The processor time of contexts, each read by one thread, and the schedules that they make."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._seconds: dict[int, float] = {}

    def seconds(self, length: int) -> float:
        """Return the time of a context of this length, from memory: many are read one after another."""
        if length not in self._seconds:
            num = max(COLD_TOKENS // length, 1)
            self._seconds[length] = least_s(attention_pass([length] * num, 1), self._rounds, time.thread_time) / num
        return self._seconds[length]

    def scheduled_s(self, lengths: Sequence[int], *, is_divided: bool) -> float:
        """Return when the last of these contexts is read: whole, or in their sections."""
        tasks = []
        for length in lengths:
            num_parts = -(-length // SECTION) if is_divided else 1
            tasks += [self.seconds(length) / num_parts] * num_parts
        return list_schedule(tasks, NUM_THREADS)


def straggler(factor: int, tasks: Tasks, *, is_divided: bool) -> dict[str, Any]:
    """Return what one batch takes, the straggler first and last, by what equal lengths take."""
    others = (SHORT,) * (NUM_SEQUENCES - 1)
    equal = ((sum(others) + factor * SHORT) // NUM_SEQUENCES,) * NUM_SEQUENCES
    orders = {"first": (factor * SHORT, *others), "last": (*others, factor * SHORT)}
    equal_s = tasks.scheduled_s(equal, is_divided=is_divided)
    by_equal = {name: tasks.scheduled_s(one, is_divided=is_divided) / equal_s for name, one in orders.items()}
    return {
        "schedule": "sections" if is_divided else "one task per sequence and head",
        "times_as_long": factor,
        "equal_ms": round(1e3 * equal_s, 3),
        **{name: round(ratio, 3) for name, ratio in by_equal.items()},
    }


def by_the_clock(factor: int, rounds: int) -> dict[str, float]:
    """Return our kernel's pass with a straggler by that of equal lengths."""
    others = (SHORT,) * (NUM_SEQUENCES - 1)
    equal = ((sum(others) + factor * SHORT) // NUM_SEQUENCES,) * NUM_SEQUENCES
    mixed_s, equal_s = (
        least_s(attention_pass(one, NUM_THREADS), rounds, time.perf_counter)
        for one in ((factor * SHORT, *others), equal)
    )
    return {"times_as_long": factor, "by_equal": round(mixed_s / equal_s, 3)}


def piece_tokens(rounds: int) -> float:
    """Return the tokens that a thread reads in the time that a piece costs beside them: a line through PIECES."""
    seconds = [least_s(attention_pass([tokens] * num, 1), rounds, time.thread_time) for num, tokens in PIECES]
    pieces = [num * -(-tokens // SECTION) for num, tokens in PIECES]
    slope, base = np.polyfit(pieces, seconds, 1)
    return max(float(slope / base * PIECES[0][0] * PIECES[0][1]), 0.0)  # noise may hide what a piece costs


def main() -> None:
    """Measure, print and record."""
    options = parser_of(__doc__, rounds=40, name="kernels/stragglers").parse_args()
    load, tasks = os.getloadavg()[0], Tasks(options.rounds)
    rows = [straggler(factor, tasks, is_divided=divided) for divided in (True, False) for factor in FACTORS]
    for row in rows:
        print(row)
    is_quiet = load < 0.5
    figures = {
        "threads": NUM_THREADS,
        "load_average": round(load, 2),
        "tokens": SHORT,
        "sequences": NUM_SEQUENCES,
        "piece_tokens": round(piece_tokens(options.rounds), 1),
        "context_us": {
            length: round(1e6 * tasks.seconds(length), 1) for length in (SHORT, *(f * SHORT for f in FACTORS))
        },
        "stragglers": rows,
        "by_the_clock": [by_the_clock(factor, options.rounds) for factor in FACTORS] if is_quiet else None,
    }
    print(figures["piece_tokens"], "tokens could be read in the time that a piece costs")
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()

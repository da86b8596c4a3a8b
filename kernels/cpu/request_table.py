"""Sums, forecasts and orders of the requests in a scheduler's table, by the native kernels where they are built.

Each function takes the table as its three stacks of columns (int64, float64, bool; [columns, capacity]) and the number
of its rows. Plain forms stand with their callers in `alignedserve.scheduling`, and give the same to the last bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Names = tuple[str, ...]
Stacks = tuple[Ints, Floats, Bools]

_native: Any = load_native("slo_forecast")


def is_native(column_names: tuple[Names, Names, Names]) -> bool:
    """Return whether the functions here can be called on a table of these columns."""
    return _native is not None and column_names == _native.REQUEST_COLUMNS


class BlockSizes(NamedTuple):
    """Sizes of blocks, by which tokens are counted in blocks."""

    block_size: int  # tokens
    hidden_ratio: float  # 0.0: no hidden cache


class DecodeSums(NamedTuple):
    """Decodes added up."""

    context_len: int
    longest: int
    hidden_len: int  # of the context lengths, those with a hidden cache
    num_constrained: int  # those with a grammar


class RealTimeDecodes(NamedTuple):
    """The real-time requests that decode with their whole cache on the device, added up."""

    num: int
    context_len: int
    longest: int
    hidden_len: int
    num_constrained: int
    least_ttft_s: float  # of all real-time requests


class FittingDecodes(NamedTuple):
    """Decodes whose next tokens fit into free blocks, added up."""

    num: int
    num_blocks: int  # that they take
    context_len: int
    longest: int
    hidden_len: int
    num_constrained: int


class RowForecasts(NamedTuple):
    """Forecasts of every row, as columns, and of all of them; seconds."""

    left_s: Floats  # predicted time that it still needs on a worker of its own
    slack_s: Floats  # until the next token is due
    eviction_slack_s: Floats  # for so long it can do without its cache and hold its objectives; up to 0: it cannot
    rank: Ints
    claim: Ints  # the rank by its objectives alone: a starving request goes first, but evicts no other
    is_ready: Bools  # decodes, its whole cache on the device
    is_free: Bools  # has no objective at all: only its length counts
    has_waited: Bools  # too long in all: no request overtakes it any more
    is_overtakable: Bools  # on the device, for requests without objectives that have far less to do
    held_blocks: int  # by requests on time
    allowed_s: float  # the longest iteration that makes no next token of those late
    banked_until_s: float  # the first time to which one of them that has begun is ahead of its schedule
    stretched_until_s: float  # the same with what its later gaps will give back
    num_overtakable: int
    num_ready: tuple[int, ...]  # of each rank
    num_waiting: tuple[int, ...]  # those that are not ready


def decode_sums(stacks: Stacks, num_rows: int, rows: Ints) -> DecodeSums:
    """Add up decodes of these rows."""
    return DecodeSums(*_native.decode_sums(*stacks, num_rows, rows))


def real_time_decodes(stacks: Stacks, num_rows: int) -> RealTimeDecodes:
    """Add up the real-time decodes."""
    return RealTimeDecodes(*_native.real_time_decodes(*stacks, num_rows))


def fitting_decodes(
    stacks: Stacks, num_rows: int, rows: Ints, *, at_most: int, num_free: int, sizes: BlockSizes
) -> FittingDecodes:
    """Add up those of these decodes, from the front, that the free blocks hold with one more token each."""
    return FittingDecodes(*_native.fitting_decodes(*stacks, num_rows, rows, at_most, num_free, *sizes))


def growing_rows(stacks: Stacks, num_rows: int, rows: Ints, num_tokens: Ints, sizes: BlockSizes) -> list[bool] | None:
    """Return which of these rows take blocks or come back from the host as they compute `num_tokens`.

    None if one computes more tokens than are known.
    """
    grows: list[bool] | None = _native.growing_rows(*stacks, num_rows, rows, num_tokens, *sizes)
    return grows


def note_completed(
    stacks: Stacks, num_rows: int, rows: Ints, num_tokens: Ints, *, now: float, duration_s: float
) -> Bools:
    """Note that these rows computed `num_tokens`; return which rows sampled a token. Changes the table."""
    has_sampled = np.empty(len(rows), np.bool_)
    _native.note_completed(*stacks, num_rows, rows, num_tokens, now, duration_s, has_sampled)
    return has_sampled


def slo_forecast(
    stacks: Stacks,
    num_rows: int,
    situation: Sequence[float],
    prompt_lens: Sequence[float],
    prompts_s: Sequence[float],
) -> RowForecasts:
    """Forecast every row. `situation`: as the kernel lists it; `prompt_lens`, `prompts_s`: times of prompts alone."""
    floats, ints = np.empty((3, num_rows), np.float64), np.empty((2, num_rows), np.int64)
    bools = np.empty((4, num_rows), np.bool_)
    sums = _native.slo_forecast(*stacks, num_rows, situation, prompt_lens, prompts_s, floats, ints, bools)
    return RowForecasts(*floats, *ints, *bools, *sums)


def ordered_rows(
    stacks: Stacks, num_rows: int, forecast: tuple[Ints, Floats, Bools], *, is_ready: bool, ranks: int, count: int
) -> Ints:
    """Return the first `count` rows of these ranks, by rank, priority, time left and arrival at the worker.

    `forecast`: rank, time left and readiness of every row; `ranks`: a bit for each. Of the rank 0 the time left does
    not count. There are at least `count` such rows.
    """
    rows = np.empty(count, np.int64)
    _native.ordered_rows(*stacks, num_rows, *forecast, is_ready, ranks, rows)
    return rows

"""The requests of a worker as columns, so that a policy decides over thousands in a few array operations.

A policy reads the columns, never writes them. Rows are dense and change their order when a request leaves, so a row
number is good for one decision; `request_ids[row]` is what lasts. Ties are broken by `order`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from kernels.cpu.request_table import is_native

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FIRST_CAPACITY = 64
_INTS = (
    *("order", "priority", "prompt_len", "max_tokens", "num_generated"),
    *("num_cached", "num_swapped", "num_blocks", "num_preemptions"),
)
_FLOATS = (
    *("arrival_s", "ttft_s", "tpot_s", "deadline_s", "predicted_len"),
    *("waits_since_s", "first_token_s", "last_token_s", "last_run_s", "service_s"),
)
_BOOLS = ("is_real_time", "is_hidden", "is_constrained")


class TableColumns(NamedTuple):
    """All columns, stacked by kind [columns, capacity], as the native kernels read them."""

    ints: Ints
    floats: Floats
    bools: Bools

    @classmethod
    def zeros(cls, capacity: int) -> "TableColumns":
        return cls(
            np.zeros((len(_INTS), capacity), np.int64),
            np.zeros((len(_FLOATS), capacity), np.float64),
            np.zeros((len(_BOOLS), capacity), np.bool_),
        )

    def with_space(self, num_rows: int) -> "TableColumns":
        stacks = zip(self, TableColumns.zeros(num_rows), strict=True)
        return TableColumns(*(np.concatenate(pair, axis=1) for pair in stacks))


COLUMN_NAMES = (_INTS, _FLOATS, _BOOLS)  # in the order of their stacks
_HAS_KERNELS = is_native(COLUMN_NAMES)


def rows_where(mask: Bools) -> Ints:
    """Return the rows where this is true, in order; `np.flatnonzero` takes four times as long over a few hundred."""
    rows: Ints = mask.nonzero()[0]
    return rows


class RequestTable:
    """One row per request, `len(table)` rows. All lengths in tokens, all times in seconds on the clock of `now`."""

    # Facts.
    order: Ints  # in which requests came to this worker: breaks every tie
    arrival_s: Floats
    is_real_time: Bools
    priority: Ints  # smaller goes first among equals
    ttft_s: Floats  # inf without this objective, as below
    tpot_s: Floats
    deadline_s: Floats  # from arrival to the last token
    prompt_len: Ints
    max_tokens: Ints  # the client's limit
    is_constrained: Bools  # its tokens are sampled under a grammar
    # Progress.
    predicted_len: Floats  # all output tokens, as predicted; max_tokens without a prediction
    num_generated: Ints
    num_cached: Ints  # tokens of the context whose cache exists, on the device or on the host
    num_swapped: Ints  # of those, on the host
    num_blocks: Ints  # device blocks held
    is_hidden: Bools  # its cache is of hidden vectors, not of keys and values
    waits_since_s: Floats  # arrival; after a preemption, that; after a token, that
    first_token_s: Floats  # nan before it
    last_token_s: Floats  # nan before the first
    last_run_s: Floats  # end of the latest iteration it was in; -inf before the first
    service_s: Floats  # time that it spent in iterations
    num_preemptions: Ints

    def __init__(self, *, allow_kernels: bool = True) -> None:
        self.has_kernels = allow_kernels and _HAS_KERNELS  # native ones, which read `columns`
        self.request_ids: list[RequestId] = []
        self._rows: dict[RequestId, int] = {}
        self._scored_len: dict[RequestId, int] = {}  # of those who want scores of their prompts: tokens before another
        self.columns = TableColumns.zeros(_FIRST_CAPACITY)
        self._num_added = 0
        self._bind()

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def num_added(self) -> int:
        """Return the number of requests added so far: `order` of the next one."""
        return self._num_added

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._rows

    def row(self, request_id: RequestId) -> int:
        """Return the current row of this request. Raises KeyError."""
        return self._rows[request_id]

    def add(
        self,
        request: Request,
        now: float,
        *,
        predicted_len: float | None = None,
        num_generated: int = 0,
        begun_s: float = 0.0,
    ) -> int:
        """Add a request without any cache; return its row.

        `num_generated`: tokens generated elsewhere before, the first of them `begun_s` ago.
        """
        request_id = request.request_id
        assert request_id not in self._rows, "a request added twice"
        row = len(self.request_ids)
        if row == self.columns.ints.shape[1]:
            self.columns = self.columns.with_space(row)
        self.request_ids.append(request_id)
        self._rows[request_id] = row
        self._bind()
        if request.sampling.num_prompt_logprobs is not None:
            self._scored_len[request_id] = request.prompt_len - 1
        limit, slo = request.sampling.max_tokens, request.slo
        for name, value in (
            ("order", self._num_added),
            ("arrival_s", request.arrival_s),
            ("is_real_time", request.is_real_time),
            ("priority", request.priority),
            ("ttft_s", np.inf if slo.ttft_s is None else slo.ttft_s),
            ("tpot_s", np.inf if slo.tpot_s is None else slo.tpot_s),
            ("deadline_s", np.inf if slo.deadline_s is None else slo.deadline_s),
            ("prompt_len", request.prompt_len),
            ("max_tokens", limit),
            ("is_constrained", bool(request.sampling.grammar)),
            ("predicted_len", max(float(limit) if predicted_len is None else min(predicted_len, float(limit)), 1.0)),
            ("num_generated", num_generated),
            ("waits_since_s", max(request.arrival_s, now) if num_generated else request.arrival_s),
            ("first_token_s", now - begun_s if num_generated else np.nan),
            ("last_token_s", now if num_generated else np.nan),
            ("last_run_s", -np.inf),
        ):
            getattr(self, name)[row] = value
        for name in ("num_cached", "num_swapped", "num_blocks", "is_hidden", "service_s", "num_preemptions"):
            getattr(self, name)[row] = 0
        self._num_added += 1
        return row

    def remove(self, request_id: RequestId) -> None:
        """Remove a request; the last row moves into its place."""
        row, last = self._rows.pop(request_id), len(self.request_ids) - 1
        self._scored_len.pop(request_id, None)
        moved = self.request_ids.pop()
        if row != last:
            self.request_ids[row] = moved
            self._rows[moved] = row
            for stack in self.columns:
                stack[:, row] = stack[:, last]
        self._bind()

    def by_arrival(self, rows: Ints, at_most: int | None = None) -> Ints:
        """Return these rows, or the first `at_most`, by arrival; ties by `order`."""
        if not len(rows):
            return rows
        if at_most is not None and at_most < len(rows):
            if at_most < 1:
                return rows[:0]
            arrival_s = self.arrival_s[rows]
            rows = rows[arrival_s <= np.partition(arrival_s, at_most - 1)[at_most - 1]]
        ordered: Ints = rows[np.lexsort((self.order[rows], self.arrival_s[rows]))]
        return ordered[:at_most]

    @property
    def context_len(self) -> Ints:
        """Prompt and generated tokens."""
        return self.prompt_len + self.num_generated

    @property
    def num_remaining(self) -> Ints:
        """Tokens to compute before the next one can be sampled: 1 while decoding, more while a prompt is prefilled."""
        return self.prompt_len + self.num_generated - self.num_cached

    def remaining(self, row: int) -> int:
        """Return `num_remaining` of one row."""
        return int(self.prompt_len[row] + self.num_generated[row] - self.num_cached[row])

    def num_scored(self, row: int, num_tokens: int, num_cached: int) -> int:
        """Return how many of the next tokens of a row, after `num_cached`, have a row of logits for their scores."""
        if not self._scored_len:
            return 0
        return min(max(self._scored_len.get(self.request_ids[row], 0) - num_cached, 0), num_tokens)

    @property
    def is_decoding(self) -> Bools:
        """True where the next iteration computes one token after a first one (the cache may lie on the host)."""
        decoding: Bools = (self.num_generated > 0) & (self.num_remaining == 1)
        return decoding

    @property
    def next_token_due_s(self) -> Floats:
        """Due time of the next token: the first at arrival + ttft_s, each later one tpot_s after the one before.

        The schedule begins with the first token. A request ahead of it may pause for as long, as tpot_s bounds the mean
        gap. inf without an objective.
        """
        has_begun = self.num_generated > 0
        after_first_s = np.multiply(self.num_generated, self.tpot_s, out=np.zeros(len(self)), where=has_begun)
        return np.where(has_begun, self.first_token_s + after_first_s, self.arrival_s + self.ttft_s)

    def _bind(self) -> None:
        num_rows = len(self.request_ids)
        for names, stack in zip(COLUMN_NAMES, self.columns, strict=True):
            for name, column in zip(names, stack[:, :num_rows], strict=True):
                setattr(self, name, column)

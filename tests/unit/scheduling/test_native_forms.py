"""Native kernels over the table against their plain forms: the same to the last bit, on random tables."""

from typing import Any

import numpy as np
import pytest

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.scheduling.table import RequestTable
from alignedserve.scheduling.table_operations import fitting_decodes, growing_rows, note_completed, note_decodes
from tests.harnesses.scheduling import request_of
from tests.support.marks import each

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RequestTable().has_kernels, reason="the native kernels are not built"),
]

NOW = 50.0
BLOCK_SIZE = 16
MEMORY = DeviceMemory(4000, 40, BLOCK_SIZE, hidden_ratio=0.37)
HALF = DeviceMemory(4000, 40, BLOCK_SIZE, hidden_ratio=0.5)
SEEDS = range(25)


def drawn_tables(seed: int) -> tuple[RequestTable, RequestTable]:
    """Draw random requests, the same for kernels and without them."""
    tables = (RequestTable(), RequestTable(allow_kernels=False))
    num_rows = int(np.random.default_rng(seed).integers(0, 150))
    for table in tables:
        rng = np.random.default_rng(seed)
        for number in range(num_rows):
            _add(table, number, rng)
    return tables


def _add(table: RequestTable, number: int, rng: np.random.Generator) -> None:
    fields: dict[str, Any] = {
        "prompt_len": int(rng.integers(1, 9000)),
        "max_tokens": int(rng.integers(1, 3000)),
        "arrival_s": NOW - float(rng.exponential(8.0)),
        "priority": int(rng.integers(0, 2)),
        "be": rng.random() < 0.4,
    }
    for name, scale in (("ttft_s", 8.0), ("tpot_s", 0.05), ("deadline_s", 60.0)):
        if rng.random() < 0.6:
            fields[name] = float(rng.exponential(scale)) + 1e-3
    row = table.add(request_of(f"r{number}", fields), NOW, predicted_len=float(rng.uniform(0.5, 900.0)))
    if rng.random() < 0.6:
        table.num_generated[row] = rng.integers(1, 700)
        table.first_token_s[row] = table.arrival_s[row] + rng.exponential(2.0)
        table.last_token_s[row] = NOW - rng.exponential(0.1)
    context_len = int(table.context_len[row])
    cached = (context_len - 1, 0, int(rng.integers(0, context_len)))[int(rng.integers(0, 3))]
    table.num_cached[row] = cached
    table.num_swapped[row] = rng.integers(0, cached + 1) if rng.random() < 0.2 else 0
    table.num_blocks[row] = -(-(cached - table.num_swapped[row]) // BLOCK_SIZE)
    table.is_hidden[row] = rng.random() < 0.2
    table.is_constrained[row] = rng.random() < 0.3
    table.service_s[row] = rng.exponential(3.0)


def drawn_rows(table: RequestTable, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw some rows in a random order."""
    rng = np.random.default_rng(seed + 1000)
    return rng.permutation(len(table))[: int(rng.integers(0, len(table) + 1))]


@each("seed", SEEDS)
def test_sums_of_decodes_are_the_same(seed: int) -> None:
    tables, works = drawn_tables(seed), (IterationWork(), IterationWork())
    rows = drawn_rows(tables[0], seed)
    for table, work in zip(tables, works, strict=True):
        note_decodes(work, table, rows)
    assert works[0] == works[1]


@pytest.mark.parametrize("memory", [MEMORY, HALF])
@pytest.mark.parametrize("seed", SEEDS)
def test_decodes_that_fit_are_the_same(seed: int, memory: DeviceMemory) -> None:
    tables = drawn_tables(seed)
    rows = drawn_rows(tables[0], seed)
    for at_most, num_free in ((-1, 5), (0, 5), (3, 5), (1000, -1), (1000, 0), (1000, 9), (1000, 1 << 40)):
        native, plain = (fitting_decodes(table, memory, rows, at_most=at_most, num_free=num_free) for table in tables)
        assert native == plain


@pytest.mark.parametrize("memory", [MEMORY, HALF])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_grow_are_the_same_and_so_is_what_they_computed(seed: int, memory: DeviceMemory) -> None:
    tables = drawn_tables(seed)
    rows = drawn_rows(tables[0], seed)
    remaining = tables[0].num_remaining[rows]
    num_tokens = np.where(np.arange(len(rows)) % 2, remaining, np.maximum(remaining // 2, 1))
    native, plain = (growing_rows(table, memory, rows, num_tokens) for table in tables)
    assert native == plain
    sampled = [note_completed(table, rows, num_tokens, now=NOW, duration_s=0.031).tolist() for table in tables]
    assert sampled[0] == sampled[1]
    for one, other in zip(tables[0].columns, tables[1].columns, strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_tokens_than_are_known_are_refused_by_both() -> None:
    for table in drawn_tables(3):
        rows = np.array([0], np.int64)
        with pytest.raises(AssertionError, match="not known yet"):
            growing_rows(table, MEMORY, rows, table.num_remaining[rows] + 1)


def test_rows_outside_the_table_are_refused() -> None:
    table, _ = drawn_tables(3)
    for row in (-1, len(table)):
        with pytest.raises(ValueError, match="outside the table"):
            note_decodes(IterationWork(), table, np.array([row], np.int64))

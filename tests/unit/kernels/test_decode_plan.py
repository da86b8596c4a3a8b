"""The plan of a step of decodes: the native kernels give what the plain forms do, and refuse other arrays."""

import numpy as np
import pytest

from kernels.cpu.native import load_native
from kernels.cpu.next_tokens import KnownTokens, next_tokens, plain_next_tokens
from kernels.gpu.attention.block_entries import TableArrays, block_arrays, plain_block_arrays
from kernels.gpu.attention.work_partition import partition, plain_partition
from tests.support.marks import each

TILE = 64
NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 8, 40, 4

pytestmark = pytest.mark.skipif(load_native("next_tokens") is None, reason="the native kernels are not built")


def table_arrays(rng: np.random.Generator) -> TableArrays:
    return TableArrays(
        rng.integers(0, 1 << 30, (NUM_ROWS, NUM_BLOCKS)), rng.random(NUM_ROWS) < 0.5, BLOCK_SIZE, scratch_block=7
    )


def known_tokens(rng: np.random.Generator) -> KnownTokens:
    table = table_arrays(rng)
    num_tokens = rng.integers(1, NUM_BLOCKS * BLOCK_SIZE, NUM_ROWS)
    num_computed = num_tokens - 1 - (rng.random(NUM_ROWS) < 0.1) * (num_tokens > 1)
    token_ids = rng.integers(0, 1 << 30, (NUM_ROWS, NUM_BLOCKS * BLOCK_SIZE), np.int32)
    return KnownTokens(
        token_ids, table.block_tables, num_computed, num_tokens, table.is_reversed, BLOCK_SIZE, slot_stride=100
    )


@each("seed", range(40))
def test_parts_are_those_of_the_plain_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, int(rng.choice([2, 70, 5000])), int(rng.integers(1, 60)))
    num_programs, window = int(rng.integers(1, 300)), [None, 1, 64, 300][seed % 4]
    native = partition(lengths, tile=TILE, num_programs=num_programs, window=window)
    plain = plain_partition(lengths, tile=TILE, num_programs=num_programs, window=window)
    for name, own, expected in zip(native._fields, native, plain, strict=True):
        assert own.dtype == expected.dtype
        assert own.tolist() == expected.tolist(), name


@each("seed", range(20))
def test_contexts_are_those_of_the_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = table_arrays(rng)
    rows = rng.permutation(NUM_ROWS)[: int(rng.integers(0, NUM_ROWS + 1))]
    lengths = rng.integers(0, NUM_BLOCKS * BLOCK_SIZE + 1, len(rows))
    with_padding = np.concatenate((lengths, np.ones(int(rng.integers(0, 4)), np.int64)))
    native, plain = block_arrays(table, rows, with_padding), plain_block_arrays(table, rows, with_padding)
    for name in native._fields:
        own, expected = getattr(native, name), getattr(plain, name)
        assert own.dtype == expected.dtype
        assert own.tolist() == expected.tolist(), name
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        count = -(-int(length) // BLOCK_SIZE)
        begin = native.starts[at]
        assert native.entries[begin : begin + count].tolist() == table.block_tables[row, :count].tolist()


@each("seed", range(20))
def test_next_tokens_are_those_of_the_plain_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known = known_tokens(rng)
    rows, num_padding = rng.permutation(NUM_ROWS)[: int(rng.integers(0, NUM_ROWS + 1))], int(rng.integers(0, 4))
    native, plain = next_tokens(known, rows, num_padding, 700), plain_next_tokens(known, rows, num_padding, 700)
    assert native.are_last == plain.are_last
    for name in native._fields[:3]:
        own, expected = getattr(native, name), getattr(plain, name)
        assert own.dtype == expected.dtype
        assert own.tolist() == expected.tolist(), name


@each(
    ("rows", "lengths"),
    [([NUM_ROWS], [1]), ([-1], [1]), ([0], [NUM_BLOCKS * BLOCK_SIZE + 1]), ([0], [-1]), ([0, 1], [1])],
)
def test_rows_and_lengths_outside_the_tables_are_refused(rows: list[int], lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises((ValueError, IndexError)):
        block_arrays(table_arrays(rng), np.array(rows), np.array(lengths))


@each(("row", "num_computed"), [(NUM_ROWS, 0), (-1, 0), (0, NUM_BLOCKS * BLOCK_SIZE), (0, -1)])
def test_tokens_outside_the_table_are_refused(row: int, num_computed: int) -> None:
    known = known_tokens(np.random.default_rng(0))
    known.num_computed[0] = num_computed
    with pytest.raises((ValueError, IndexError)):
        next_tokens(known, np.array([row]), 0, 0)


@each("first", [-1, 9, 2**63 - 1])
def test_arrays_outside_what_they_are_packed_into_are_refused(first: int) -> None:
    packed = np.zeros(16, np.uint8)
    pack_arrays = load_native("pack_arrays").pack_arrays
    assert pack_arrays(packed, np.array([[8, 8]]), [np.ones(1)]) == 16
    with pytest.raises(ValueError, match="place"):
        pack_arrays(packed, np.array([[first, 8]]), [np.ones(1)])


def test_a_context_without_a_token_is_refused() -> None:
    with pytest.raises((ValueError, AssertionError)):
        partition(np.array([3, 0]), tile=TILE, num_programs=2)

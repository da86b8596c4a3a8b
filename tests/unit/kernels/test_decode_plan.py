"""The plan of a GPU's decodes: the native kernel gives what the plain form does, and refuses other arrays."""

import numpy as np
import pytest

from kernels.cpu.native import load_native
from kernels.gpu.block_entries import block_entries, plain_block_entries
from kernels.gpu.work_partition import partition, plain_partition
from tests.support.marks import each

TILE = 64

pytestmark = pytest.mark.skipif(load_native("partition_work") is None, reason="the native kernels are not built")


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
def test_entries_are_those_of_the_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 1 << 30, (8, 40))
    rows = rng.permutation(8)[: int(rng.integers(0, 9))]
    widths = rng.integers(0, 41, len(rows))
    native, plain = block_entries(tables, rows, widths), plain_block_entries(tables, rows, widths)
    assert native.dtype == plain.dtype
    assert (
        native.tolist()
        == plain.tolist()
        == [entry for row, width in zip(rows, widths, strict=True) for entry in tables[row, :width]]
    )


@each(("rows", "widths"), [([8], [1]), ([-1], [1]), ([0], [41]), ([0], [-1]), ([0, 1], [1])])
def test_rows_and_widths_outside_the_tables_are_refused(rows: list[int], widths: list[int]) -> None:
    with pytest.raises((ValueError, IndexError)):
        block_entries(np.zeros((8, 40), np.int64), np.array(rows), np.array(widths))


def test_a_context_without_a_token_is_refused() -> None:
    with pytest.raises((ValueError, AssertionError)):
        partition(np.array([3, 0]), tile=TILE, num_programs=2)

"""Checksums of runs: the same in one piece or many, on the host or by a device's arithmetic."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.runtime.kv.block_checksums import RunChecksums, copy_rows, place_runs
from alignedserve.runtime.kv.transfers.device_checksums import DeviceRunChecksums, run_checksum

BLOCK_BYTES = 64


def rows(num_blocks: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_pieces_of_any_size_give_the_sums_of_whole_runs(counts: list[int], sizes: list[int]) -> None:
    content = rows(sum(counts)).reshape(-1)
    checksums = RunChecksums(place_runs(counts), BLOCK_BYTES)
    start = 0
    while start < len(content):
        size = sizes[start % len(sizes)]
        checksums.update(content[start : start + size])
        start += size
    expected = [
        xxhash.xxh3_64_intdigest(content[before * BLOCK_BYTES : (before + count) * BLOCK_BYTES].data, before)
        for before, count in place_runs(counts)
    ]
    assert checksums.values == expected


@pytest.mark.parametrize("block_bytes", [64, 256 * 1024, 256 * 1024 + 64, 1024 * 1024])
@pytest.mark.parametrize("from_target", [True, False])
def test_rows_are_copied_and_summed_in_one_pass(block_bytes: int, from_target: bool) -> None:
    source = np.random.default_rng(1).integers(0, 256, (3, block_bytes), np.uint8)
    target = np.zeros_like(source)
    checksums = RunChecksums(place_runs([1, 2]), block_bytes)
    copy_rows(source, target, checksums, from_target=from_target)
    assert (source == target).all()
    expected = [xxhash.xxh3_64_intdigest(source[0].data, 0), xxhash.xxh3_64_intdigest(source[1:].reshape(-1).data, 1)]
    assert checksums.values == expected


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 3))
def test_a_devices_sums_are_those_of_the_reference(counts: list[int], piece: int, seed: int) -> None:
    content = rows(sum(counts), seed)
    checksums = DeviceRunChecksums(place_runs(counts), BLOCK_BYTES, torch.device("cpu"))
    for first in range(0, len(content), piece):
        checksums.update(torch.from_numpy(content[first : first + piece]))
    expected = [run_checksum(content[before : before + count], before) for before, count in place_runs(counts)]
    assert checksums.values == expected


def test_a_devices_sum_is_pinned() -> None:
    """It crosses processes: another value is another version of the protocol."""
    content = np.arange(128, dtype=np.uint8).reshape(2, 64)
    assert [run_checksum(content, 0), run_checksum(content, 3), run_checksum(np.zeros((1, 64), np.uint8), 0)] == [
        16453429581953323788,
        18287433299349474016,
        1211152058750508914,
    ]


@given(st.integers(0, 4 * BLOCK_BYTES * 8 - 1), st.integers(0, 4 * BLOCK_BYTES * 8 - 1))
def test_a_devices_sum_finds_flipped_bits(one: int, other: int) -> None:
    content = rows(4)
    flipped = content.copy()
    for bit in {one, other}:
        flipped.reshape(-1)[bit // 8] ^= 1 << (bit % 8)
    assert run_checksum(flipped, 0) != run_checksum(content, 0)


def test_a_devices_sum_knows_places() -> None:
    content = rows(4)
    whole = run_checksum(content, 0)
    assert run_checksum(content, 1) != whole
    assert run_checksum(content[[1, 0, 2, 3]], 0) != whole
    assert run_checksum(content[:3], 0) != whole
    swapped = content.copy()
    swapped[0, :8], swapped[0, 8:16] = content[0, 8:16], content[0, :8]
    assert run_checksum(swapped, 0) != whole
    assert run_checksum(np.zeros((2, 64), np.uint8), 0) != run_checksum(np.zeros((1, 64), np.uint8), 0) != 0

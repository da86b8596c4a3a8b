"""Checksums of runs: the same in one piece or many, on the host or by a device's arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_checksums import Digests, RunChecksums, run_checksums
from alignedserve.runtime.kv.block_runs import BlockRuns, join_placed, place_runs
from kernels.block_digests import row_digests
from kernels.cpu.block_copies import all_rows, digest_blocks
from kernels.cpu.row_digest import PART_BYTES
from tests.support.marks import each

BLOCK_BYTES = 64


def rows(num_blocks: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)


def digests_of(num_blocks: int) -> Digests:
    return np.random.default_rng(num_blocks).integers(0, 1 << 64, num_blocks, np.uint64)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_digests_in_pieces_of_any_size_give_the_sums_of_whole_runs(counts: list[int], sizes: list[int]) -> None:
    digests, runs = digests_of(sum(counts)), place_runs(counts)
    checksums = RunChecksums(runs)
    start = 0
    for size in [*sizes, len(digests)]:
        checksums.add(digests[start : start + size])
        start += size
    assert checksums.values == run_checksums(digests, runs)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_request_sums_to_the_same_however_it_is_cut(counts: list[int], others: list[int]) -> None:
    digests = digests_of(sum(counts))
    (whole,) = run_checksums(digests, place_runs([len(digests)]))
    assert sum(run_checksums(digests, place_runs(counts))) % (1 << 64) == whole
    # Those of another request behind it begin anew.
    both = join_placed([place_runs(counts), place_runs(others)])
    after = digests_of(sum(others))
    expected = run_checksums(digests, place_runs(counts)) + run_checksums(after, place_runs(others))
    assert run_checksums(np.concatenate([digests, after]), both) == expected


def test_nothing_has_no_checksums() -> None:
    nothing = join_placed([])
    assert run_checksums(np.empty(0, np.uint64), nothing) == []
    assert RunChecksums(nothing).values == []


def test_checksums_are_pinned() -> None:
    """They cross processes: other values are another version of the protocol."""
    content = np.arange(512, dtype=np.uint64).view(np.uint8).reshape(4, 1024)
    digests = digest_blocks(all_rows(content))
    assert run_checksums(digests, place_runs([3, 1])) == [17549384278262308115, 15331517581389805295]


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_are_those_of_neighbours(numbers: list[int]) -> None:
    block_ids = [BlockId(number) for number in numbers]
    runs = BlockRuns.of(block_ids)
    assert list(runs.pairs()) == contiguous_runs(block_ids)
    assert runs.block_ids().tolist() == numbers == BlockRuns.named(runs.pairs()).block_ids().tolist()
    each = BlockRuns.of(block_ids, is_by_block=True)
    assert each.pairs() == tuple((number, 1) for number in numbers)
    assert [runs.placed(7).num_before.tolist(), runs.num_blocks] == [
        [7 + sum(count for _, count in runs.pairs()[:index]) for index in range(len(runs.pairs()))],
        len(numbers),
    ]


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 200])
def test_numbers_that_no_block_has_are_refused(number: int) -> None:
    with pytest.raises(HandoffRejected, match="block number that is out of range"):
        BlockRuns.named([(number, 1)])


@each(
    "block_bytes",
    [8, 64, 240, 256, 264, 1000, 1024, 1032, 4096 + 8, PART_BYTES, PART_BYTES + 8, 40 * 1024, 80 * 1024 + 1024],
)
def test_a_devices_digests_are_the_hosts(block_bytes: int) -> None:
    content = np.random.default_rng(block_bytes).integers(0, 256, (3, block_bytes), np.uint8)
    digests = row_digests(torch.from_numpy(content)).numpy().view(np.uint64)
    assert digests.tolist() == digest_blocks(all_rows(content)).tolist()
    assert not len(row_digests(torch.empty((0, block_bytes), dtype=torch.uint8)))


@given(st.integers(0, 1 << 32), st.sampled_from([1, 8, 64]), st.data())
def test_parts_that_change_places_are_found(seed: int, num_bytes: int, data: st.DataObject) -> None:
    """Each is summed by itself: its place has to count, also where two differ by little."""
    rng = np.random.default_rng(seed)
    parts = np.tile(rng.integers(0, 256, PART_BYTES, np.uint8), (5, 1))
    one, other = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True))
    first = data.draw(st.integers(0, PART_BYTES - num_bytes))
    parts[one, first : first + num_bytes] ^= rng.integers(1, 256, num_bytes).astype(np.uint8)
    swapped = parts.copy()
    swapped[[one, other]] = parts[[other, one]]
    (as_sent, as_arrived) = digest_blocks(all_rows(np.stack([parts.reshape(-1), swapped.reshape(-1)])))
    assert as_sent != as_arrived


def test_digests_of_many_alike_blocks_differ_in_every_half() -> None:
    content = np.zeros((4096, 1064), np.uint8)
    content[:, 1000:1002] = np.arange(4096, dtype=np.uint16)[:, None].view(np.uint8)
    digests = digest_blocks(all_rows(content))
    for half in (digests >> np.uint64(32), digests & np.uint64(0xFFFFFFFF)):
        assert len(np.unique(half)) > 4090  # by chance two of 4096 are equal once in 500 times


@given(st.integers(0, 4 * BLOCK_BYTES * 8 - 1), st.integers(0, 4 * BLOCK_BYTES * 8 - 1))
def test_flipped_bits_are_found(one: int, other: int) -> None:
    content = rows(4)
    flipped = content.copy()
    for bit in {one, other}:
        flipped.reshape(-1)[bit // 8] ^= 1 << (bit % 8)
    expected = run_checksums(digest_blocks(all_rows(content)), place_runs([4]))
    assert run_checksums(digest_blocks(all_rows(flipped)), place_runs([4])) != expected

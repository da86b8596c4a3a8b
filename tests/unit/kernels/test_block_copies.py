"""Copies of listed blocks: the bytes arrive, each digest is the plain one, at every level and without any."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.cpu import block_copies
from kernels.cpu.block_copies import BlockList, Bytes, all_rows, copy_blocks, digest_blocks, levels
from kernels.cpu.row_digest import row_digest

pytestmark = pytest.mark.slow

PLAIN = "no extension"
BLOCK_BYTES = (1, 8, 63, 64, 240, 255, 256, 257, 1000, 1024, 1088, 2048, 3001, 4096 + 8, 16384, 16385, 80 * 1024)
SOURCES, TARGETS = np.array([3, 0, 4, 3]), np.array([5, 1, 2, 0])


@pytest.fixture(params=[*levels(), PLAIN])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """The level to run at; None, without the extension: the plain form."""
    if request.param == PLAIN:
        monkeypatch.setattr(block_copies, "_native", None)
        yield None
    else:
        yield request.param


def random_blocks(num_blocks: int, block_bytes: int) -> Bytes:
    return np.random.default_rng(block_bytes).integers(0, 256, (num_blocks, block_bytes), np.uint8)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_blocks_are_copied_and_summed(block_bytes: int, is_streamed: bool, level: str | None) -> None:
    blocks, written = random_blocks(5, block_bytes), np.zeros((6, block_bytes), np.uint8)
    source, target = BlockList(blocks, SOURCES), BlockList(written, TARGETS)
    digests = copy_blocks(source, target, is_streamed=is_streamed, level=level)
    expected = [row_digest(blocks[block]) for block in SOURCES]
    assert digests.tolist() == expected == digest_blocks(source, level=level).tolist()
    assert (written[TARGETS] == blocks[SOURCES]).all()
    assert not written[[3, 4]].any()


def test_without_digests_only_the_bytes_go(level: str | None) -> None:
    for block_bytes in (64, 1000, 80 * 1024):
        blocks, written = random_blocks(5, block_bytes), np.zeros((6, block_bytes), np.uint8)
        source, target = BlockList(blocks, SOURCES), BlockList(written, TARGETS)
        for is_streamed in (False, True):
            written[:] = 0
            digests = copy_blocks(source, target, with_digests=False, is_streamed=is_streamed, level=level)
            assert not len(digests)
            assert (written[TARGETS] == blocks[SOURCES]).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_share_the_blocks(num_threads: int) -> None:
    blocks = random_blocks(40, 640 * 1024)
    written, order = np.zeros_like(blocks), np.random.default_rng(0).permutation(40)
    digests = copy_blocks(BlockList(blocks, order), all_rows(written), num_threads=num_threads)
    assert (written == blocks[order]).all()
    assert digests.tolist() == digest_blocks(all_rows(written), num_threads=num_threads).tolist()


@pytest.mark.parametrize("block_bytes", [1000, 64 * 1024])
def test_digests_are_of_what_was_written_whoever_writes_to_the_source(block_bytes: int, level: str | None) -> None:
    blocks, written = random_blocks(4, block_bytes), np.zeros((4, block_bytes), np.uint8)
    is_over = threading.Event()

    def scribble() -> None:
        while not is_over.is_set():
            np.bitwise_xor(blocks, 0x5A, out=blocks)

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(20):
            digests = copy_blocks(all_rows(blocks), all_rows(written), is_streamed=True, level=level)
            assert digests.tolist() == [row_digest(row) for row in written]
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize("block", [-1, 2, 1 << 40])
def test_blocks_outside_are_refused_before_anything_is_written(block: int, level: str | None) -> None:
    blocks, written = random_blocks(2, 64), np.zeros((2, 64), np.uint8)
    outside, inside = np.array([0, block]), np.array([0, 1])
    with pytest.raises(ValueError, match="outside"):
        copy_blocks(BlockList(blocks, outside), BlockList(written, inside), level=level)
    with pytest.raises(ValueError, match="outside"):
        copy_blocks(BlockList(blocks, inside), BlockList(written, outside), level=level)
    with pytest.raises(ValueError, match="outside"):
        digest_blocks(BlockList(blocks, outside), level=level)
    assert not written.any()

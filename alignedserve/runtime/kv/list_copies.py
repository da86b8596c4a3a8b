"""Copies between pieces of blocks and lists of blocks in host memory; loads no torch."""

from collections.abc import Iterable

import numpy as np

from kernels.cpu.block_copies import BlockList, Digests, copy_blocks


def copy_from_pieces(
    pieces: Iterable[BlockList], target: BlockList, *, num_threads: int = 1, is_streamed: bool | None = None
) -> Digests:
    digests, first = np.empty(len(target), np.uint64), 0
    for piece in pieces:
        last = first + len(piece)
        part = target.part(first, last)
        digests[first:last] = copy_blocks(piece, part, num_threads=num_threads, is_streamed=is_streamed)
        first = last
    assert first == len(target), "as many targets as blocks"
    return digests


def copy_to_pieces(source: BlockList, pieces: Iterable[BlockList], *, num_threads: int = 1) -> Digests:
    digests, first = np.empty(len(source), np.uint64), 0
    for piece in pieces:  # to its end and past it: the last piece is on its device only then
        last = first + len(piece)
        digests[first:last] = copy_blocks(source.part(first, last), piece, num_threads=num_threads)
        first = last
    assert first == len(source), "as many targets as blocks"
    return digests

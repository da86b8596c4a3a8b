"""The way in which the bytes of blocks travel between the two ends of a block transfer, piece by piece.

Nothing here, nor in what serves blocks over a connection, loads torch: the KV pool does without it.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

OWNER_RANK, CLIENT_RANK = 0, 1  # the two ends
NUM_PIECES = 3  # some are filled, or emptied, while others travel

Rows = Any  # uint8 [n, block_bytes]: an array, or a Tensor of a process pair
Fill = Callable[[int, Rows], None]  # (number of the first block, rows to fill)
Take = Callable[[int, Rows], None]


class BlockChannel(Protocol):
    """Streams blocks in either direction. Raises PeerLost when the other end is gone, or silent for too long."""

    def send(self, num_blocks: int, fill: Fill) -> None:
        """Send this many blocks; `fill` gathers the next ones while the ones before travel."""

    def receive(self, num_blocks: int, take: Take) -> None:
        """Receive this many blocks; `take` empties a piece while the next one travels."""

    def close(self) -> None:
        """Release its threads and memory. Not during a transfer; may be repeated."""


def cut(num_blocks: int, piece_blocks: int) -> Iterator[tuple[int, int, int]]:
    for index, first in enumerate(range(0, num_blocks, piece_blocks)):
        yield index % NUM_PIECES, first, min(piece_blocks, num_blocks - first)

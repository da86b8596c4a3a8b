"""Divides the memory that a prefill worker lends among decode workers: the sizes of its candidate buffers, in blocks.

Decode workers come one by one, more than were planned may come, and a buffer keeps its size while it is lent. So the
memory is divided into one part for each decode worker planned on this node and one for all others (on other nodes, or
added later): one of these gets an equal part of what is left for as many as are still expected, and one more.

Example: 90 blocks, two decode workers here and two elsewhere: the ones here get 30 each; the first from elsewhere gets
10 of the other 30, the second 10, a third that was not planned 5, a fourth 2."""

from collections.abc import Collection


class BufferBudget:
    """Blocks by decode worker. Never more are lent than there are."""

    def __init__(self, num_blocks: int, near: Collection[str], *, num_others: int = 0, may_grow: bool = False) -> None:
        """`near`: decode workers planned on this node; `num_others`: how many others are; `may_grow`: more may come."""
        has_others = may_grow or num_others > 0 or not near
        self.num_blocks = num_blocks
        self._share = num_blocks // (len(near) + has_others)
        self._near = frozenset(near)
        self._num_left = num_blocks - self._share * len(near)  # for others
        self._num_expected = num_others
        self._lent: dict[str, int] = {}

    def is_planned_here(self, peer: str) -> bool:
        """Return whether this decode worker was planned on this node."""
        return peer in self._near

    @property
    def num_lent(self) -> int:
        """Number of blocks that are lent."""
        return sum(self._lent.values())

    def lend(self, peer: str) -> int:
        """Return the blocks of a buffer for this decode worker, which has none; 0: it does without."""
        assert peer not in self._lent, "a decode worker has one buffer"
        if peer in self._near:
            num_blocks = self._share
        else:
            num_others = sum(other not in self._near for other in self._lent)
            num_blocks = self._num_left // (max(self._num_expected - num_others, 1) + 1)
            self._num_left -= num_blocks
        self._lent[peer] = num_blocks
        return num_blocks

    def give_back(self, peer: str) -> None:
        """Take back the buffer of a decode worker, if any."""
        num_blocks = self._lent.pop(peer, 0)
        if peer not in self._near:
            self._num_left += num_blocks

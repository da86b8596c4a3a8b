"""Blocks that several requests of a worker use: how many are freed when some of them leave.

A request uses the first blocks of its context. Two requests that share a block share all blocks before it as well. So
the number of users never grows along a request's blocks: its shared blocks come first.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from alignedserve.core.ids import RequestId


class UsedBlock(Protocol):
    """A block that may have several users."""

    @property
    def num_users(self) -> int:
        """Requests that use it now."""


HeldBlocks = Mapping[RequestId, Sequence[UsedBlock]]  # the first blocks of requests, as far as they may be shared


def num_shared(blocks: Sequence[UsedBlock]) -> int:
    """Count a request's blocks that others use as well, by bisection; they are its first ones."""
    if not blocks or blocks[0].num_users < 2:
        return 0
    below, above = 1, len(blocks)  # all before `below` are shared, none from `above` on
    while below < above:
        middle = (below + above) // 2
        below, above = (middle + 1, above) if blocks[middle].num_users > 1 else (below, middle)
    return below


class LeavingUsers:
    """Requests that leave one after the other, in a plan: which of their blocks others still use."""

    __slots__ = ("_held", "_num_users")

    def __init__(self, held: HeldBlocks, num_users: dict[int, int] | None = None) -> None:
        self._held = held
        self._num_users: dict[int, int] = num_users or {}  # by the identity of blocks that some have left

    def copy(self) -> "LeavingUsers":
        return LeavingUsers(self._held, dict(self._num_users))

    def leave(self, request_id: RequestId, num_kept: int = 0) -> int:
        """Note that a request leaves all but its first blocks; return how many of those it leaves are still used."""
        num_users, num_still_used = self._num_users, 0
        for block in self._held.get(request_id, ())[num_kept:]:
            left = num_users.get(id(block), block.num_users) - 1
            num_users[id(block)] = left
            num_still_used += left > 0
        return num_still_used

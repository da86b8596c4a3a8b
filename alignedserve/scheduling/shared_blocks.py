"""Blocks shared by two requests, a real-time one from the left and a best-effort one from the right (BROS, section 5).

Only the last block of a cache is partly filled: a pair shares the last block of each, and no request is in two pairs.
Where the real-time request grows into slots of the best-effort one, just those slots are copied to the host first (lazy
checkpointing). They hold its latest tokens, so the rest on the device is a prefix of the context. A best-effort request
that would grow into real-time slots leaves the block and moves its tokens to a block of its own.

Prefixes are shared otherwise: whole blocks at the start of a context. Two requests that share a block share all earlier
blocks, so the number of users never grows along a request's blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.table import RequestTable


class BlockPair(NamedTuple):
    """Two requests whose last blocks are one block."""

    real_time: RequestId
    best_effort: RequestId


class AllocationResult(NamedTuple):
    """Blocks and tokens for a scheduled or uploaded request."""

    num_blocks: int  # allocated, after those that the request has
    num_swapped: int  # tokens swapped in from the host
    joined: RequestId | None = None  # its last block is this one's last as well, after those allocated
    num_moved: int = 0  # tokens in the block that it shared, which is the other's now: the first allocated replaces it


def slots_in_last(num_tokens: int, block_size: int) -> int:
    return (num_tokens - 1) % block_size + 1


def num_overwritten(num_slots: int, num_beside: int, block_size: int) -> int:
    """Count the slots where `num_slots` from the left of a block meet `num_beside` from its right."""
    return max(num_slots + num_beside - block_size, 0)


class SharedBlocks:
    """The pairs of one worker, by request; how many slots each has follows from the table."""

    def __init__(self, table: RequestTable, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._partners: dict[RequestId, RequestId] = {}  # both ways

    def __len__(self) -> int:
        return len(self._partners) // 2

    def pairs(self) -> Iterator[BlockPair]:
        for request_id, other in self._partners.items():
            if self._table.is_real_time[self._table.row(request_id)]:
                yield BlockPair(request_id, other)

    def partner(self, request_id: RequestId) -> RequestId | None:
        return self._partners.get(request_id)

    def partner_rows(self) -> dict[int, int]:
        row = self._table.row
        return {row(request_id): row(other) for request_id, other in self._partners.items()}

    def share(self, request_id: RequestId, other: RequestId) -> None:
        is_real_time, row = self._table.is_real_time, self._table.row
        assert is_real_time[row(request_id)] != is_real_time[row(other)], "two of a class would fill the same slots"
        assert request_id not in self._partners, "a block shared by three"
        assert other not in self._partners, "a block shared by three"
        self._partners[request_id], self._partners[other] = other, request_id

    def part(self, request_id: RequestId) -> RequestId | None:
        other = self._partners.pop(request_id, None)
        if other is not None:
            del self._partners[other]
        return other

    def used_slots(self, row: int, num_more: int = 0) -> int:
        """Return the slots that a row will have in its last block after `num_more` tokens; 0: it has no block.

        A cache on the host comes back before a row computes, and counts.
        """
        table = self._table
        num_tokens = int(table.num_cached[row]) + num_more - (0 if num_more else int(table.num_swapped[row]))
        return slots_in_last(num_tokens, self._block_size) if num_tokens else 0


class UsedBlock(Protocol):
    """A block that may have several users."""

    @property
    def num_users(self) -> int:
        """Requests that use it now."""


HeldBlocks = Mapping[RequestId, Sequence[UsedBlock]]  # the shareable first blocks of requests


def num_shared(blocks: Sequence[UsedBlock]) -> int:
    """Count the first blocks of a request that have other users, by bisection."""
    if not blocks or blocks[0].num_users < 2:
        return 0
    below, above = 1, len(blocks)  # all before `below` are shared, none from `above` on
    while below < above:
        middle = (below + above) // 2
        below, above = (middle + 1, above) if blocks[middle].num_users > 1 else (below, middle)
    return below


class LeavingUsers:
    """Counts blocks still in use while the requests of a plan leave one by one."""

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

"""Blocks for a request of BROS: FindBlock and FindPreemptBlock (section 5.2 of the paper)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from alignedserve.scheduling.policy import EvictionMode, PlannedEviction, WorkerView
from alignedserve.scheduling.sharing_packer import SharingPacker


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """A way to the blocks that a request needs."""

    evictions: tuple[PlannedEviction, ...] = ()
    partner: int | None = None  # the row whose last block it shares; None: it needs no share


class BlockSearch:
    """One search: what has to leave the device for one request, in the order in which it was found."""

    def __init__(self, view: WorkerView, packer: SharingPacker) -> None:
        self._packer = packer
        self._is_real_time = view.table.is_real_time
        self._block_size = view.memory.block_size
        self._is_lazy = view.memory.has_shared_blocks
        self._has_users = bool(view.held_blocks)
        self._leaving: dict[int, int] = {}  # tokens, the last on the device, by row

    def find(
        self, row: int, num_tokens: int, victims: Callable[[], Iterable[int]], *, may_take: bool
    ) -> FoundBlocks | None:
        """Return evictions and a share by which the request has its blocks; None: there are none.

        `may_take`: it may share a block or evict `victims`, in this order; else it needs free blocks.
        """
        packer = self._packer
        missing = packer.blocks_needed(row, num_tokens) - packer.num_free
        overwritten = packer.overwritten(row, num_tokens)
        if missing <= 0 and overwritten is None:
            return FoundBlocks()
        partner = packer.find_partner(row, num_tokens) if missing > 0 and may_take else None
        for shared in dict.fromkeys((partner, None)):
            self._leaving = {}
            if shared is not None and (overlap := packer.overwritten_by_joining(row, num_tokens, shared)):
                self._leaving[shared] = overlap  # first of all: the host has room for it
            if overwritten is not None:
                self._leaving[overwritten.row] = overwritten.num_tokens
            if self._take_all(missing - (shared is not None), victims if may_take else tuple, shared):
                return FoundBlocks(self._evictions(), shared)
        return None

    def _take_all(self, missing: int, victims: Callable[[], Iterable[int]], shared: int | None) -> bool:
        if missing > 0:
            num_freed = 0
            for victim in victims():
                num_freed += self._take(victim, missing - num_freed) if victim != shared else 0
                if self._has_users:  # what victims have may be used by others too
                    num_freed = self._packer.num_freed_by(self._leaving)
                if missing <= num_freed:
                    return True
            return False
        return True

    def _take(self, victim: int, missing: int) -> int:
        packer, partner = self._packer, self._partner(victim)
        if self._is_real_time[victim]:
            if partner is not None:  # it leaves the block as well, which would not be free otherwise
                self._leaving[partner] = packer.num_on_device(partner) - self._tokens_in(self._num_blocks(partner) - 1)
            num_blocks = self._num_blocks(victim)
        else:
            is_sharing = partner is not None
            num_own = self._num_blocks(victim) - is_sharing
            num_blocks = min(num_own, missing) if self._is_lazy else num_own
            if 0 < num_blocks < num_own:
                tokens = self._tokens_in(num_own - num_blocks)
                self._leaving[victim] = packer.num_on_device(victim) - tokens
                return num_blocks
        if num_blocks:
            self._leaving[victim] = packer.num_on_device(victim)
        return num_blocks

    def _evictions(self) -> tuple[PlannedEviction, ...]:
        evictions, room = [], self._packer.num_free_host
        for row, num_tokens in self._leaving.items():
            if num_tokens > room:
                evictions.append(PlannedEviction(row, EvictionMode.DROP))
            else:
                evictions.append(PlannedEviction(row, EvictionMode.SWAP, num_tokens))
                room -= num_tokens
        return tuple(evictions)

    def _num_left(self, row: int) -> int:
        return self._packer.num_on_device(row) - self._leaving.get(row, 0)

    def _num_blocks(self, row: int) -> int:
        return -(-self._num_left(row) // self._block_size)

    def _tokens_in(self, num_blocks: int) -> int:
        return num_blocks * self._block_size

    def _partner(self, row: int) -> int | None:
        other = self._packer.partner(row)
        if other is None or self._leaves_block(row) or self._leaves_block(other):
            return None
        return other

    def _leaves_block(self, row: int) -> bool:
        return self._num_blocks(row) < -(-self._packer.num_on_device(row) // self._block_size)

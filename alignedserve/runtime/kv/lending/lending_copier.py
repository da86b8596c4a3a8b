"""Performs the copies of a worker that lends memory to others, and makes and frees that memory."""

import asyncio
from collections.abc import Callable

from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    CloseBuffer,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    UnmapArena,
)
from alignedserve.runtime.kv.block_copier import BlockCopier
from alignedserve.runtime.kv.lending.candidate_memory import CandidateMemory

CopyCommand = LoadBlocks | OffloadBlocks | MapArena | UnmapArena | OpenBuffer | CloseBuffer
CopyEvent = BlocksLoaded | BlocksOffloaded | BufferOpened


class LendingCopier:
    """Performs the copy commands of one worker."""

    def __init__(self, copier: BlockCopier, memory: CandidateMemory | None) -> None:
        """`memory`: None: it lends none."""
        self._copier = copier
        self._memory = memory

    def perform(self, command: CopyCommand, dispatch: Callable[[CopyEvent], None]) -> None:
        """Start it; `dispatch` takes its outcome, later."""
        match command:
            case LoadBlocks():
                self._copier.start_load(command, dispatch)
            case OffloadBlocks():
                self._copier.start_offload(command, dispatch)
            case MapArena(peer, offered, stamps):
                self._copier.map_arena(peer, offered, stamps=stamps)
            case UnmapArena(peer):
                self._copier.unmap_arena(peer)
            case OpenBuffer(peer, link_epoch):
                self._open_buffer(peer, link_epoch, dispatch)
            case CloseBuffer(peer):
                self._copier.unmap_arena(peer)
                self._lent().close_for(peer)

    def start_relay(self, command: RelayBlocks, buffer_of: str, dispatch: Callable[[BlocksRelayed], None]) -> None:
        """Start a copy between a pool and the buffer that is lent to this decode worker."""
        self._copier.start_relay(command, buffer_of, dispatch)

    def close(self) -> None:
        """Close the transfers and free the memory, once the threads have ended."""
        self._copier.close()
        if self._memory is not None:
            self._memory.close()

    def _lent(self) -> CandidateMemory:
        assert self._memory is not None, "a buffer of a worker that lends none"
        return self._memory

    def _open_buffer(self, peer: str, link_epoch: int, dispatch: Callable[[CopyEvent], None]) -> None:
        memory = self._lent()
        opened = memory.open_for(peer)
        if opened is None:
            # Not within the dispatch that asked for it: the rest of its commands comes first.
            asyncio.get_running_loop().call_soon(dispatch, BufferOpened(peer, link_epoch, None))
            return

        def used(*, is_used: bool) -> None:
            if not is_used and memory.is_open(peer, opened):
                memory.close_for(peer)
            dispatch(BufferOpened(peer, link_epoch, opened.offered if is_used else None))

        self._copier.use_buffer(peer, opened.memory, opened.offered, lambda is_used: used(is_used=is_used))

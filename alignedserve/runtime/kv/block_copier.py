"""A worker's copies, beside whatever it computes: between its storage, the pool's arena and candidate buffers.

Every peer has a copying thread of its own, so that one that is slow or gone holds up nobody else, and copies with one
peer happen in the order in which they were asked for.
"""

import logging
from collections.abc import Callable

from alignedserve.core.errors import PeerError, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
)
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.registry import AUTO, open_transfer
from alignedserve.runtime.kv.transfers.shm_transfer import Incoming, KVTransfer, Outgoing, ShmTransfer, relay
from alignedserve.runtime.process.links import Identity
from alignedserve.runtime.process.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)


class BlockCopier:
    """Performs LoadBlocks, OffloadBlocks and RelayBlocks. Methods return at once; results go to callbacks on the loop.

    A transfer that cannot be opened, or whose other end is gone, makes every copy of that call a refusal; it is opened
    anew for the next.
    """

    def __init__(
        self, storage: BlockStorage, threads: WorkerThreads, identity: Identity, *, transport: str = AUTO
    ) -> None:
        self._storage = storage
        self._threads = threads
        self._identity = identity
        self._transport = transport
        self._offers: dict[str, tuple[ArenaOffered, bool]] = {}
        self._transfers: dict[str, KVTransfer] = {}

    # --- called on the loop

    def map_arena(self, peer: str, offered: ArenaOffered, *, stamps: bool) -> None:
        """Use this arena of the peer from now on. `stamps`: it is a candidate buffer (see ShmTransfer)."""
        self._offers[peer] = (offered, stamps)
        self._threads.submit(_thread(peer), lambda: self._open(peer), _ignore)

    def use_arena(self, peer: str, arena: Arena) -> None:
        """Use this arena of our own, made for the peer. It stays its maker's to remove."""
        self._offers.pop(peer, None)
        self._threads.submit(_thread(peer), lambda: self._replace(peer, arena), _ignore)

    def unmap_arena(self, peer: str) -> None:
        """The peer is gone, and its arena with it."""
        self._offers.pop(peer, None)
        self._threads.submit(_thread(peer), lambda: self._let_go(peer), _ignore)

    def start_load(self, command: LoadBlocks, on_done: Callable[[BlocksLoaded], None]) -> None:
        """Copy in, all in one transfer, and verify."""
        self._threads.submit(_thread(command.source), lambda: self._load(command), on_done)

    def start_offload(self, command: OffloadBlocks, on_done: Callable[[BlocksOffloaded], None]) -> None:
        """Copy out."""
        self._threads.submit(_thread(command.target), lambda: self._offload(command), on_done)

    def start_relay(self, command: RelayBlocks, peer: str, on_done: Callable[[BlocksRelayed], None]) -> None:
        """Copy from arena to arena, on the thread of this one of the two peers."""
        self._threads.submit(_thread(peer), lambda: self._relay(command), on_done)

    # --- on the threads

    def _load(self, command: LoadBlocks) -> BlocksLoaded:
        transfer = self._transfer(command.source)
        incoming = [Incoming(part.copy, part.block_ids) for part in command.loads]
        held: list[bool] = [False] * len(incoming)
        if transfer is not None:
            try:
                held = transfer.fetch(incoming)
            except PeerError as error:
                self._give_up(command.source, error)
        refused = [part.request_id for part, is_held in zip(command.loads, held, strict=True) if not is_held]
        for request_id in refused:
            logger.warning("request %s: what lies at %s does not verify", request_id, command.source)
        return BlocksLoaded(command.source, command.loads, frozenset(refused))

    def _offload(self, command: OffloadBlocks) -> BlocksOffloaded:
        transfer = self._transfer(command.target)
        if transfer is None:
            return BlocksOffloaded(command, None)
        outgoing = Outgoing(command.block_ids, command.target_block_ids, command.generation)
        try:
            return BlocksOffloaded(command, transfer.offload([outgoing])[0])
        except PeerError as error:
            self._give_up(command.target, error)
            return BlocksOffloaded(command, None)

    def _relay(self, command: RelayBlocks) -> BlocksRelayed:
        source, target = self._transfer(command.source), self._transfer(command.target)
        if not isinstance(source, ShmTransfer) or not isinstance(target, ShmTransfer):
            return BlocksRelayed(command, None)
        ids, generation = command.target_block_ids, command.generation
        runs = relay(source.arena, command.copy, target.arena, ids, generation, stamps=target.stamps)
        return BlocksRelayed(command, runs)

    def _transfer(self, peer: str) -> KVTransfer | None:
        """The way to the peer's blocks, opened when first used; None: there is none."""
        known, entry = self._transfers.get(peer), self._offers.get(peer)
        if known is not None or entry is None:
            return known
        offered, stamps = entry
        # The pool's arena is always shared memory of this host; the choice is about buffers.
        transport = self._transport if stamps else AUTO
        try:
            opened = open_transfer(offered, self._storage, identity=self._identity, stamps=stamps, transport=transport)
        except (PeerError, TransportUnavailable) as error:
            logger.error("no way to the blocks of %s: %s", peer, error)
            return None
        self._transfers[peer] = opened
        return opened

    def _open(self, peer: str) -> None:
        """At once, not with the first copy: that one need not wait for it, and the log says how blocks will go."""
        self._let_go(peer)
        self._transfer(peer)

    def _give_up(self, peer: str, error: PeerError) -> None:
        logger.warning("the transfer with %s broke: %s", peer, error)
        self._let_go(peer)

    def _let_go(self, peer: str) -> None:
        transfer = self._transfers.pop(peer, None)
        # A mapping may still be in use by a relay on another thread: it goes when the last one drops it.
        if transfer is not None and not isinstance(transfer, ShmTransfer):
            transfer.close()

    def _replace(self, peer: str, arena: Arena) -> None:
        self._let_go(peer)
        self._transfers[peer] = ShmTransfer(self._storage, arena, stamps=True)


def _thread(peer: str) -> str:
    return f"copy {peer}"


def _ignore(nothing: None) -> None:
    """The outcome of what has none; what it raised has been raised by then."""

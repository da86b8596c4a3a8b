"""The copies of a rank beside the first: its parts of the blocks that the first rank names."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from alignedserve.core.errors import PeerError, TransportUnavailable
from alignedserve.runtime.device.device_work import copying, use_device
from alignedserve.runtime.engine.ranks.copy_commands import (
    CloseBlocks,
    CopyCommand,
    CopyDone,
    FetchParts,
    OffloadParts,
    OpenBlocks,
    OrderedCopy,
)
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums, PartsOffer, leave
from alignedserve.runtime.kv.transfers.registry import open_transfer

logger = logging.getLogger(__name__)


class RankPeers:
    """What a rank copies with each peer. Methods about one peer come from one thread."""

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage
        self._transfers: dict[str, PartTransfer] = {}

    def open(self, peer: str, offer: PartsOffer) -> None:
        """Open a transfer to this rank's part of a peer's blocks. Raises TransportUnavailable or PeerLost."""
        self.close(peer)
        self._transfers[peer] = open_transfer(
            offer.offered, self._storage, identity=offer.identity, stamps=offer.stamps, transport=offer.transport
        )

    def close(self, peer: str) -> None:
        transfer = self._transfers.pop(peer, None)
        if transfer is not None:
            leave(transfer)

    def close_all(self) -> None:
        for peer in list(self._transfers):
            self.close(peer)

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> tuple[Checksums, ...]:
        """Copy parts out and return their checksums, by request. Raises PeerLost."""
        if peer not in self._transfers:
            return (None,) * len(requests)
        sent = self._transfers[peer].offload(requests)
        return tuple(None if runs is None else [run.checksum for run in runs] for runs in sent)

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> tuple[Checksums, ...]:
        """Copy parts in and return their checksums as they arrived, by request. Raises PeerLost."""
        if peer not in self._transfers:
            return (None,) * len(requests)
        return tuple(self._transfers[peer].fetch_unverified(requests))


class FrameCount:
    """How many frames of steps a rank has performed."""

    def __init__(self) -> None:
        self._count = 0
        self._is_ended = False
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def wait(self, count: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self._count >= count)
            return self._count >= count


class FollowerCopies:
    """Performs copies, those with one peer in order on a thread of its own."""

    def __init__(self, connection: socket.socket, storage: BlockStorage, performed: FrameCount) -> None:
        self._connection = connection
        self._storage = storage
        self._performed = performed
        self._peers = RankPeers(storage)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._answering = threading.Lock()

    def follow(self) -> None:
        with self._connection, contextlib.suppress(OSError):
            while (payload := receive_frame(self._connection)) is not None:
                ordered = decode(payload, OrderedCopy)
                self._thread_of(ordered.command.peer).submit(self._answer, ordered)
        self._performed.end()
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
        self._peers.close_all()

    def _thread_of(self, peer: str) -> ThreadPoolExecutor:
        if peer not in self._threads:
            self._threads[peer] = ThreadPoolExecutor(1, f"copy {peer}", use_device, (self._storage.device,))
        return self._threads[peer]

    def _answer(self, ordered: OrderedCopy) -> None:
        try:
            if not self._performed.wait(ordered.num_frames):
                return
            done = self._perform(ordered)
            with self._answering:
                send_frame(self._connection, encode(done))
        except OSError:
            logger.info("the first rank of this worker has ended")
        except BaseException:
            logger.exception("a copy of this rank failed")
            os._exit(1)  # a rank's end is its worker's

    def _perform(self, ordered: OrderedCopy) -> CopyDone:
        number, peer = ordered.number, ordered.command.peer
        try:
            with copying(self._storage.device):
                return self._done(number, ordered.command)
        except PeerError:
            self._peers.close(peer)
            return CopyDone(number, is_lost=True)
        except TransportUnavailable as error:
            return CopyDone(number, refusal=str(error))

    def _done(self, number: int, command: CopyCommand) -> CopyDone:
        peers = self._peers
        match command:
            case OpenBlocks(peer, offer):
                peers.open(peer, offer)
            case CloseBlocks(peer):
                peers.close(peer)
            case OffloadParts(peer, requests):
                return CopyDone(number, peers.offload(peer, requests))
            case FetchParts(peer, requests):
                return CopyDone(number, peers.fetch(peer, requests))
        return CopyDone(number)

"""The copies of a rank beside the first: its parts of the blocks that the first rank names."""

import contextlib
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from alignedserve.core.errors import NotEnoughMemory, PeerError, TransportUnavailable
from alignedserve.runtime.device.devices import use_device, working
from alignedserve.runtime.engine.ranks.copy_commands import (
    CloseBlocks,
    CopyDone,
    FetchParts,
    LendBlocks,
    OffloadParts,
    OpenBlocks,
    OrderedCopy,
    RelayParts,
)
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame
from alignedserve.runtime.engine.ranks.rank_peers import RankPeers
from alignedserve.runtime.kv.block_storage import BlockStorage

logger = logging.getLogger(__name__)


class FrameCount:
    """How many frames of steps a rank has performed."""

    def __init__(self) -> None:
        self._count = 0
        self._is_ended = False
        self._changed = threading.Condition()

    def add(self) -> None:
        """Note one more."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def end(self) -> None:
        """End all waits: no more will be performed."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def wait(self, count: int) -> bool:
        """Wait until this many copies were performed; False: they will not be."""
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
        """Perform what comes, until the first rank closes the connection."""
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
            with working(self._storage.device):
                done = self._perform(ordered)
            with self._answering:
                send_frame(self._connection, encode(done))
        except OSError:
            logger.info("the first rank of this worker has ended")
        except BaseException:
            logger.exception("a copy of this rank failed")
            os._exit(1)  # a rank's end is its worker's

    def _perform(self, ordered: OrderedCopy) -> CopyDone:
        peers, number = self._peers, ordered.number
        try:
            match ordered.command:
                case OpenBlocks(peer, offer):
                    peers.open(peer, offer)
                case LendBlocks(peer, loan):
                    return CopyDone(number, address=peers.lend(peer, loan))
                case CloseBlocks(peer):
                    peers.close(peer)
                case OffloadParts(peer, requests):
                    return CopyDone(number, peers.offload(peer, requests))
                case FetchParts(peer, requests):
                    return CopyDone(number, peers.fetch(peer, requests))
                case RelayParts(relay=relay):
                    return CopyDone(number, peers.relay(relay))
        except PeerError:
            peers.close(ordered.command.peer)
            return CopyDone(number, is_lost=True)
        except (TransportUnavailable, NotEnoughMemory) as error:
            return CopyDone(number, refusal=str(error))
        return CopyDone(number)

"""The copies of a rank beside the first: its parts of the blocks that the first rank names."""

import contextlib
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.device.devices import use_device, working
from alignedserve.runtime.engine.ranks.copy_commands import (
    CloseBlocks,
    CopyDone,
    FetchParts,
    OffloadParts,
    OpenBlocks,
    OrderedCopy,
)
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums
from alignedserve.runtime.kv.transfers.shm_transfer import ShmTransfer, open_shm_transfer

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
        """Wait until so many were performed; False: they will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self._count >= count)
            return self._count >= count


class FollowerCopies:
    """Performs copies, those with one peer in order on a thread of its own."""

    def __init__(self, connection: socket.socket, storage: BlockStorage, performed: FrameCount) -> None:
        self._connection = connection
        self._storage = storage
        self._performed = performed
        self._transfers: dict[str, ShmTransfer] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._answering = threading.Lock()

    def follow(self) -> None:
        """Perform what comes, until the first rank closes the connection."""
        with self._connection, contextlib.suppress(OSError):
            while (payload := receive_frame(self._connection)) is not None:
                ordered = decode(payload, OrderedCopy)
                self._thread_of(ordered.command.peer).submit(self._answer, ordered)
        self._performed.end()

    def _thread_of(self, peer: str) -> ThreadPoolExecutor:
        if peer not in self._threads:
            self._threads[peer] = ThreadPoolExecutor(1, f"copy {peer}", use_device, (self._storage.device,))
        return self._threads[peer]

    def _answer(self, ordered: OrderedCopy) -> None:
        try:
            if not self._performed.wait(ordered.num_frames):
                return
            with working(self._storage.device):
                checksums = self._perform(ordered)
            with self._answering:
                send_frame(self._connection, encode(CopyDone(ordered.number, checksums)))
        except OSError:
            logger.info("the first rank of this worker has ended")
        except BaseException:
            logger.exception("a copy of this rank failed")
            os._exit(1)  # a rank's end is its worker's

    def _perform(self, ordered: OrderedCopy) -> tuple[Checksums, ...]:
        match ordered.command:
            case OpenBlocks(peer, offered):
                self._open(peer, offered)
            case CloseBlocks(peer):
                self._transfers.pop(peer, None)
            case OffloadParts(peer, requests) if peer in self._transfers:
                sent = self._transfers[peer].offload(requests)
                return tuple(None if runs is None else [run.checksum for run in runs] for runs in sent)
            case FetchParts(peer, requests) if peer in self._transfers:
                return tuple(self._transfers[peer].fetch_unverified(requests))
            case OffloadParts(requests=requests) | FetchParts(requests=requests):
                return (None,) * len(requests)
        return ()

    def _open(self, peer: str, offered: ArenaOffered) -> None:
        self._transfers.pop(peer, None)
        try:
            self._transfers[peer] = open_shm_transfer(offered, self._storage)
        except HandoffRejected as error:
            logger.error("the blocks of %s cannot be reached: %s", peer, error)

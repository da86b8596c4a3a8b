"""Copies of blocks of several ranks: the first orders them over a connection to each, each copies its own parts."""

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from alignedserve.core.errors import PeerError, PeerLost, ProtocolError, TransportUnavailable
from alignedserve.runtime.device.device_work import copying, use_device
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums, PartsOffer, Waited, leave
from alignedserve.runtime.kv.transfers.registry import open_transfer
from kernels.cpu.rank_exchange import ExchangeBroken


class OpenBlocks(msgspec.Struct, frozen=True, tag=True):
    """Open a transfer to this rank's part of a peer's blocks, in place of any before."""

    peer: str
    offer: PartsOffer


class CloseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Leave a peer's blocks."""

    peer: str


class OffloadParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts out."""

    peer: str
    requests: tuple[OffloadRequest, ...]


class FetchParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts in."""

    peer: str
    requests: tuple[FetchRequest, ...]


CopyCommand = OpenBlocks | CloseBlocks | OffloadParts | FetchParts


class OrderedCopy(msgspec.Struct, frozen=True):
    """A command to one rank."""

    number: int  # of the command, for its answer
    num_frames: int  # of steps, which the rank has performed before: swaps of the same blocks are among them
    command: CopyCommand


class CopyDone(msgspec.Struct, frozen=True):
    """The answer."""

    number: int
    checksums: tuple[list[int] | None, ...] = ()  # of each request's runs, of this rank's parts; None: it is refused
    refusal: str = ""  # why nothing was opened
    is_lost: bool = False  # the peer is, and what was copied is unknown


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


_Answer = Future[CopyDone]


class GroupCopies:
    """Implements RankCopies over a connection to each rank. From any thread."""

    def __init__(self, connections: Sequence[socket.socket], num_frames: Callable[[], int]) -> None:
        """`num_frames`: how many frames of steps the ranks were sent so far."""
        self.size = len(connections) + 1
        self._connections = connections
        self._num_frames = num_frames
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_lost = False
        self._awaited: list[dict[int, _Answer]] = [{} for _ in connections]
        for connection, awaited in zip(connections, self._awaited, strict=True):
            threading.Thread(target=self._receive, args=(connection, awaited), name="rank copies", daemon=True).start()

    def open(self, peer: str, offer: PartsOffer) -> None:
        refusals = [done.refusal for done in _awaited(self._order(OpenBlocks(peer, offer)))]
        if any(refusals):
            raise TransportUnavailable(_reasons(refusals))

    def close(self, peer: str) -> None:
        with contextlib.suppress(ExchangeBroken):
            self._order(CloseBlocks(peer))

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        return self._copied(OffloadParts(peer, tuple(requests)))

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        return self._copied(FetchParts(peer, tuple(requests)))

    def end(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _copied(self, command: CopyCommand) -> Waited:
        answers = self._order(command)
        return lambda: [done.checksums for done in _awaited(answers)]

    def _order(self, command: CopyCommand) -> list[_Answer]:
        touches_steps = isinstance(command, OffloadParts | FetchParts)
        answers: list[_Answer] = [Future() for _ in self._connections]
        with self._lock:  # so that all ranks see commands in one order
            if self._is_lost:
                raise ExchangeBroken("a rank of this worker has ended")
            number = next(self._numbers)
            payload = encode(OrderedCopy(number, self._num_frames() if touches_steps else 0, command))
            for connection, awaited, answer in zip(self._connections, self._awaited, answers, strict=True):
                awaited[number] = answer
                try:
                    send_frame(connection, payload)
                except OSError as error:
                    raise ExchangeBroken("a rank of this worker has ended") from error
        return answers

    def _receive(self, connection: socket.socket, awaited: dict[int, _Answer]) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            while (payload := receive_frame(connection)) is not None:
                done = decode(payload, CopyDone)
                with self._lock:
                    answer = awaited.pop(done.number, None)
                if answer is not None:  # otherwise it has failed with another rank's
                    answer.set_result(done)
        with self._lock:
            self._is_lost = True  # whatever other ranks may answer yet: see _order
            lost = [answer for each in self._awaited for answer in each.values()]
            for each in self._awaited:
                each.clear()
        for answer in lost:
            answer.set_exception(ExchangeBroken("a rank of this worker has ended"))


def _awaited(answers: Sequence[_Answer]) -> list[CopyDone]:
    done = [answer.result() for answer in answers]
    if any(copy.is_lost for copy in done):
        raise PeerLost("the peer of a rank's copy is gone")
    return done


def _reasons(refusals: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(refusals, 1) if reason)

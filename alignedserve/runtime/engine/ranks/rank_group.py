"""The ranks of one worker: this process is the first, and starts a process for each of the others.

Copies of blocks of several ranks: the first orders them over a connection to each, each copies its own parts."""

import contextlib
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
from typing_extensions import override

from alignedserve.core.errors import NotEnoughMemory, PeerError, PeerLost, ProtocolError, TransportUnavailable
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swaps
from alignedserve.process.connected_process import ConnectedProcess
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.accelerator import copying, use_device
from alignedserve.runtime.device.collectives import Collectives
from alignedserve.runtime.device.devices import CPU
from alignedserve.runtime.device.memory_maps import map_file, take_pages
from alignedserve.runtime.device.streams import Event
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame, wait_started
from alignedserve.runtime.engine.ranks.rank_commands import (
    AppendBlocks,
    CopyBlocks,
    PerformSwaps,
    RankCommand,
    RemoveSequence,
    ReplaceBlock,
    RunStep,
    SetTokens,
    WriteCopies,
    addition_of,
)
from alignedserve.runtime.engine.ranks.rank_spec import Meeting, RankEngineSpec, RankStart, join
from alignedserve.runtime.engine.steps.step import Forced, Slices
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums, PartsOffer, RankCopies, Waited, leave
from alignedserve.runtime.kv.transfers.registry import open_transfer
from kernels.cpu.rank_exchange import ExchangeBroken, has_rank_exchange, make_exchange_memory
from kernels.cpu.unnamed_files import unnamed_file


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


_MODULE = "alignedserve.runtime.engine.ranks.follower_process"
_LOST = "a rank of this worker has ended, or has not answered in time"
_LOOKING_S = 0.1  # for which a wait for the device looks again and again, as CUDA's own does: longer than most steps
_PAUSE_S = 0.001  # between two looks from then on
_END_S = 10.0  # for a watcher to end behind its process


class MirroredRanks(ABC):
    """Other processes of a worker; implements RankMirror. A subclass sends the frames."""

    copies: RankCopies

    def __init__(self) -> None:
        self._told: list[RankCommand] = []
        self._encoder = msgspec.msgpack.Encoder()

    def add_sequence(self, sequence: NewSequence) -> None:
        self._told.append(addition_of(sequence))

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        self._told.append(AppendBlocks(request_id, tuple(block_ids)))

    def copy_blocks(self, sources: Sequence[BlockId]) -> None:
        self._told.append(CopyBlocks(tuple(sources)))

    def write_copies(self, targets: Sequence[BlockId]) -> None:
        self._told.append(WriteCopies(tuple(targets)))

    def replace_block(self, request_id: RequestId, index: int, block_id: BlockId) -> None:
        self._told.append(ReplaceBlock(request_id, index, block_id))

    def remove_sequence(self, request_id: RequestId) -> None:
        self._told.append(RemoveSequence(request_id))

    def perform_swaps(self, swaps: Swaps) -> None:
        self._told.append(PerformSwaps(swaps))

    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        parts = tuple((part[0], part[1]) for part in slices)
        self._told.append(RunStep(parts, tuple(forced.items()), takes_highest))

    def set_tokens(self, token_ids: IntArray) -> None:
        self._told.append(SetTokens(tuple(token_ids.tolist())))

    def flush(self) -> None:
        payload = self._encoder.encode(self._told)
        self._told.clear()
        self._send(payload)

    @abstractmethod
    def wait_for(self, event: Event) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """End the other processes at once."""

    @abstractmethod
    def close(self) -> None:
        """End the other processes and wait."""

    @abstractmethod
    def _send(self, payload: bytes) -> None:
        """Send a frame to every rank. Raises ExchangeBroken when one has ended."""


class RankGroup(MirroredRanks):
    """The other ranks' processes, which end with this process. Every step fails after a rank has ended or timed out."""

    def __init__(self, spec: RankEngineSpec, *, uses_process_group: bool = False) -> None:
        """Start the other ranks; their loading goes on beside this process's, see `wait`.

        `uses_process_group`: ranks on CPUs add up by gloo even where shared memory would do. Raises ExchangeBroken."""
        super().__init__()
        is_on_cpu = all(spec.device(rank).type == CPU for rank in range(spec.size))
        has_memory = is_on_cpu and has_rank_exchange() and not uses_process_group
        self._folder = Path(tempfile.mkdtemp(prefix="alignedserve-ranks-"))
        self._is_closed = self._is_broken = False
        self._timeout_s = spec.timeout_s
        self.meeting = meeting = Meeting(
            make_exchange_memory(spec.size) if has_memory else None,
            self._folder / "meeting",
            make_block_memory(spec.memory_bytes) if is_on_cpu else None,
        )
        self._descriptors = meeting.descriptors
        self._followers = [_Follower(spec, rank, meeting) for rank in range(1, spec.size)]
        try:
            self.collectives: Collectives = join(spec, 0, meeting)
        except ExchangeBroken:
            self._end()
            raise
        self._num_frames = 0
        self.copies: GroupCopies = GroupCopies([peer.copies for peer in self._followers], lambda: self._num_frames)
        self._watchers = [
            threading.Thread(target=self._watch, args=(follower,), name=f"rank {follower.rank}", daemon=True)
            for follower in self._followers
        ]
        for watcher in self._watchers:
            watcher.start()

    def wait(self) -> None:
        """Wait until every rank has loaded its share; this process has made its storages. Raises what a rank could not
        do, ExchangeBroken if one has ended."""
        for follower in self._followers:
            follower.wait_started()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._close_descriptors()

    @override
    def kill(self) -> None:
        """End the other ranks at once: a rank that hangs does not hear of an end."""
        self._break_off()
        for follower in self._followers:
            follower.process.kill()

    @override
    def wait_for(self, event: Event) -> None:
        """A sum within a replayed graph raises nothing itself, and never ends without all ranks."""
        began_s = time.monotonic()
        while not event.is_done():
            waited_s = time.monotonic() - began_s
            if self._is_broken or waited_s > self._timeout_s:
                raise ExchangeBroken(_LOST)
            time.sleep(0.0 if waited_s < _LOOKING_S else _PAUSE_S)
        event.synchronize()
        if self._is_broken:
            raise ExchangeBroken(_LOST)

    @override
    def close(self) -> None:
        self._is_closed = True
        self.copies.end()
        self._end()
        for watcher in self._watchers:
            watcher.join(_END_S)

    @override
    def _send(self, payload: bytes) -> None:
        self._num_frames += 1
        for follower in self._followers:
            follower.send(payload)

    def _end(self) -> None:
        for follower in self._followers:
            follower.end()
        self._close_descriptors()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def _watch(self, follower: "_Follower") -> None:
        status = follower.process.wait()
        if not self._is_closed:
            logger.error("rank %d of this worker has ended, with status %d", follower.rank, status)
            self._break_off()

    def _break_off(self) -> None:
        self._is_broken = True  # before waits end, which then have computed nothing
        self.collectives.break_off()


class _Follower:
    def __init__(self, spec: RankEngineSpec, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._connection, theirs = socket.socketpair()
        self.copies, their_copies = socket.socketpair()
        self.process = ConnectedProcess(_MODULE, (theirs, their_copies), meeting.descriptors)
        self.send(encode(RankStart(rank, spec, meeting)))

    def send(self, payload: bytes) -> None:
        try:
            send_frame(self._connection, payload)
        except OSError as error:
            raise ExchangeBroken(f"rank {self.rank} of this worker has ended") from error

    def wait_started(self) -> None:
        wait_started(self._connection, f"rank {self.rank} of this worker has ended while it was loading")

    def end(self) -> None:
        self._connection.close()
        self.copies.close()
        self.process.end()


def make_block_memory(num_bytes: int) -> int:
    """Return the descriptor of anonymous memory, taken now. Raises NotEnoughMemory."""
    message = f"KV blocks of all ranks need {num_bytes} bytes"
    if num_bytes > psutil.virtual_memory().available:
        raise NotEnoughMemory(f"{message}, more than is available; lower the number of blocks.")
    descriptor = unnamed_file("kv-blocks")
    try:
        os.ftruncate(descriptor, num_bytes)
        content = map_file(descriptor, num_bytes)
        take_pages(descriptor, lambda: content, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise NotEnoughMemory(f"{message}; lower the number of blocks.") from error
    return descriptor

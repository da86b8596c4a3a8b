"""The ranks of one worker: this process is the first, and starts a process for each of the others."""

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from typing_extensions import override

from alignedserve.core.errors import NotEnoughMemory
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swaps
from alignedserve.process.connected_process import ConnectedProcess
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.collectives import Collectives
from alignedserve.runtime.device.devices import CPU
from alignedserve.runtime.device.memory_maps import map_file, take_pages
from alignedserve.runtime.device.streams import Event
from alignedserve.runtime.engine.ranks.frames import encode, send_frame, wait_started
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
from alignedserve.runtime.engine.ranks.rank_copies import GroupCopies
from alignedserve.runtime.engine.ranks.rank_spec import Meeting, RankEngineSpec, RankStart, join
from alignedserve.runtime.engine.steps.step import Forced, Slices
from alignedserve.runtime.kv.transfers.ranked_transfer import RankCopies
from kernels.cpu.rank_exchange import ExchangeBroken, has_rank_exchange, make_exchange_memory
from kernels.cpu.unnamed_files import unnamed_file

logger = logging.getLogger(__name__)

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

        `uses_process_group`: ranks on CPUs add up by gloo even where shared memory would do. Raises ExchangeBroken.
        """
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
        """Wait until every rank has loaded its share; this process has made its storages.

        Raises what a rank could not do, ExchangeBroken if one has ended.
        """
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

"""One peer's requests to the owner of a buffer, handled in order."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, ProtocolError
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemoryHandle,
    NamedBlocks,
    ReadBlocks,
    WriteBlocks,
)
from alignedserve.runtime.kv.block_checksums import check_target, expand_runs
from alignedserve.runtime.kv.block_runs import BlockIds, Ints
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.channels.block_channel import BlockChannel, BlockStream, Rows
from alignedserve.runtime.kv.transfers.channels.control_socket import ControlSocket
from kernels.cpu.block_copies import BlockList

logger = logging.getLogger(__name__)

_MAX_TIMES_BUFFER = 16  # blocks in one message, in multiples of the buffer
_NOWHERE = -1  # the target of blocks that arrive for a refused request


class ServedBuffer(Protocol):
    """Blocks and the generations on them, as their owner serves them: an ArenaBuffer or a DeviceBuffer."""

    layout: BlockLayout
    num_blocks: int
    writer_stamps: bool  # the writer stamps the blocks (a candidate buffer); in the pool's arena their owner has

    def part_of(self, part: ArenaPart) -> "ServedBuffer":
        """Return what is served to a rank that copies this part of each block. Raises HandoffRejected."""

    def begin_thread(self) -> None:
        """Prepare the calling thread for copies of these blocks: a device becomes its current one."""

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark these blocks as written under this generation."""

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""

    def gather(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""

    def scatter(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy rows into blocks."""

    def listed(self, block_ids: BlockIds) -> BlockList | None:
        """Return blocks in place; None: they are not in this process's memory."""

    def exported(self) -> DeviceMemoryHandle | None:
        """Return a handle by which another process of this machine maps the blocks; None: they are not on a device."""


class TransferSession:
    """Handles the requests of one peer in order. Without a channel the peer moves the bytes itself (cuda_ipc)."""

    def __init__(self, buffer: ServedBuffer, control: ControlSocket, channel: BlockChannel | None) -> None:
        self._buffer = buffer
        self._control = control
        self._channel = channel
        self._current: list[tuple[int, Ints | None]] = []  # generation and blocks of the latest requests

    def handle(self, message: object) -> None:
        """Perform one message. Raises PeerLost or ProtocolError, after which the session is unusable."""
        match message:
            case WriteBlocks(requests=requests):
                self._check_sizes(requests)
                self._current = [(one.generation, self._writable(one)) for one in requests]
                if self._channel is not None:
                    self._receive(self._channel, requests)
                self._answer_again()
            case ReadBlocks(requests=requests):
                self._check_sizes(requests)
                self._current = [(one.generation, self._readable(one)) for one in requests]
                self._answer()
                if self._channel is not None:
                    self._send(self._channel)
                    self._answer_again()
            case BlocksCopied() if self._channel is None:
                self._answer_again()
            case _:
                raise ProtocolError("the peer sent a message out of turn")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _receive(self, channel: BlockChannel, requests: Sequence[NamedBlocks]) -> None:
        targets = _joined(
            blocks if blocks is not None else np.full(sum(count for _, count in named.runs), _NOWHERE, np.int64)
            for named, (_, blocks) in zip(requests, self._current, strict=True)
        )
        if isinstance(channel, BlockStream) and self._buffer.listed(targets[:0]) is not None:
            channel.receive_lists(self._lists_to_fill(targets))
            return

        def take(first: int, rows: Rows) -> None:
            part = targets[first : first + len(rows)]
            wanted = np.flatnonzero(part != _NOWHERE)
            if len(wanted) == len(part):
                self._buffer.scatter(part, rows)
                return
            for row in wanted.tolist():
                self._buffer.scatter(part[row : row + 1], rows[row : row + 1])

        channel.receive(len(targets), take)

    def _lists_to_fill(self, targets: Ints) -> Iterator[BlockList]:
        unwanted = np.empty((1, self._buffer.layout.block_bytes), np.uint8)
        changes = np.flatnonzero(np.diff(targets == _NOWHERE)) + 1
        for part in np.split(targets, changes):
            is_wanted = bool(len(part)) and part[0] != _NOWHERE
            listed = self._buffer.listed(part) if is_wanted else BlockList(unwanted, np.zeros_like(part))
            assert listed is not None, "a buffer in this process's memory"
            yield listed

    def _send(self, channel: BlockChannel) -> None:
        sources = _joined(blocks for _, blocks in self._current if blocks is not None)
        listed = self._buffer.listed(sources)
        if listed is not None and isinstance(channel, BlockStream):
            channel.send_lists([listed])
            return

        def fill(first: int, rows: Rows) -> None:
            self._buffer.gather(sources[first : first + len(rows)], rows)

        channel.send(len(sources), fill)

    def _answer(self) -> None:
        self._control.send(BlocksAnswered(tuple(blocks is not None for _, blocks in self._current)))

    def _answer_again(self) -> None:
        self._current = [
            (generation, blocks if blocks is not None and self._buffer.is_stamped(blocks, generation) else None)
            for generation, blocks in self._current
        ]
        self._answer()

    def _check_sizes(self, requests: Sequence[NamedBlocks]) -> None:
        counts = [sum(count for _, count in named.runs) for named in requests]
        if any(count > self._buffer.num_blocks for count in counts):
            raise ProtocolError("the peer asks for more blocks than the buffer has")
        if sum(counts) > _MAX_TIMES_BUFFER * self._buffer.num_blocks:
            raise ProtocolError("requests for too many blocks")

    def _writable(self, named: NamedBlocks) -> Ints | None:
        try:
            blocks = expand_runs(named.runs, self._buffer.num_blocks)
            check_target(blocks, len(blocks), named.generation, self._buffer.num_blocks)
            if self._buffer.writer_stamps:
                self._buffer.stamp(blocks, named.generation)
            elif not self._buffer.is_stamped(blocks, named.generation):
                raise HandoffRejected("the lease is no longer valid")
        except HandoffRejected as error:
            logger.warning("write under generation %d refused: %s", named.generation, error)
            return None
        return blocks

    def _readable(self, named: NamedBlocks) -> Ints | None:
        try:
            blocks = expand_runs(named.runs, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("read of generation %d refused: %s", named.generation, error)
            return None
        return blocks if self._buffer.is_stamped(blocks, named.generation) else None


def _joined(lists: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *lists])

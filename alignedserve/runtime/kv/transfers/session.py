"""One peer's questions to the owner of a buffer, answered in order."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, ProtocolError
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemoryHandle,
    NamedBlocks,
    ReadBlocks,
    WriteBlocks,
)
from alignedserve.runtime.kv.block_checksums import check_target, spelt_out
from alignedserve.runtime.kv.transfers.control import Control
from alignedserve.runtime.kv.transfers.process_pair import Pair

logger = logging.getLogger(__name__)

_MAX_TIMES_BUFFER = 16  # blocks in one question, in multiples of the buffer


class ServedBuffer(Protocol):
    """The blocks of an owner and the generations on them: an ArenaBuffer, or a DeviceBuffer."""

    layout: BlockLayout
    num_blocks: int
    device: torch.device

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        """Mark these blocks as written under this generation."""

    def is_stamped(self, block_ids: Sequence[BlockId], generation: int) -> bool:
        """Whether they all are."""

    def gather(self, block_ids: Sequence[BlockId], rows: Tensor) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""

    def scatter(self, block_ids: Sequence[BlockId], rows: Tensor) -> None:
        """Copy rows into blocks."""

    def exported(self) -> DeviceMemoryHandle | None:
        """How another process of this machine maps the blocks, where they lie on a device."""


class Session:
    """Questions of one peer, answered in order. Without a pair the peer moves the bytes by itself (cuda_ipc)."""

    def __init__(self, buffer: ServedBuffer, control: Control, pair: Pair | None) -> None:
        self._buffer = buffer
        self._control = control
        self._pair = pair
        self._in_hand: list[tuple[int, list[BlockId] | None]] = []  # generation and blocks of the last question

    def answer(self, question: object) -> None:
        """Perform one question. Raises PeerLost or ProtocolError, after which the session is over."""
        match question:
            case WriteBlocks(requests=requests):
                self._bound(requests)
                self._in_hand = [(one.generation, self._writable(one)) for one in requests]
                if self._pair is not None:
                    self._receive(self._pair, requests)
                self._tell()
            case ReadBlocks(requests=requests):
                self._bound(requests)
                self._in_hand = [(one.generation, self._readable(one)) for one in requests]
                self._tell()
                if self._pair is not None:
                    self._send(self._pair)
                    self._tell_again()
            case BlocksCopied() if self._pair is None:
                self._tell_again()
            case _:
                raise ProtocolError("a question out of turn")

    def _receive(self, pair: Pair, requests: Sequence[NamedBlocks]) -> None:
        """Take all bytes in, and write those whose request holds."""
        targets: list[BlockId | None] = []
        for named, (_, blocks) in zip(requests, self._in_hand, strict=True):
            targets += blocks if blocks is not None else [None] * sum(count for _, count in named.runs)

        def take(first: int, rows: Tensor) -> None:
            wanted = [
                (row, target) for row, target in enumerate(targets[first : first + len(rows)]) if target is not None
            ]
            if len(wanted) == len(rows):
                self._buffer.scatter([target for _, target in wanted], rows)
                return
            for row, target in wanted:
                self._buffer.scatter([target], rows[row : row + 1])

        pair.receive(len(targets), take)

    def _send(self, pair: Pair) -> None:
        sources = [block_id for _, blocks in self._in_hand for block_id in blocks or ()]

        def fill(first: int, rows: Tensor) -> None:
            self._buffer.gather(sources[first : first + len(rows)], rows)

        pair.send(len(sources), fill)

    def _tell(self) -> None:
        self._control.send(BlocksAnswered(tuple(blocks is not None for _, blocks in self._in_hand)))

    def _tell_again(self) -> None:
        """A generation may have been replaced while its blocks were read."""
        self._in_hand = [
            (generation, blocks if blocks is not None and self._buffer.is_stamped(blocks, generation) else None)
            for generation, blocks in self._in_hand
        ]
        self._tell()

    def _bound(self, requests: Sequence[NamedBlocks]) -> None:
        """Refused as a whole: no peer of ours asks for this, and it would keep us busy for ever."""
        counts = [sum(count for _, count in named.runs) for named in requests]
        if any(count > self._buffer.num_blocks for count in counts):
            raise ProtocolError("a request of more blocks than the buffer has")
        if sum(counts) > _MAX_TIMES_BUFFER * self._buffer.num_blocks:
            raise ProtocolError("a question about too many blocks")

    def _writable(self, named: NamedBlocks) -> list[BlockId] | None:
        try:
            blocks = spelt_out(named.runs, self._buffer.num_blocks)
            check_target(blocks, len(blocks), named.generation, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("write under generation %d refused: %s", named.generation, error)
            return None
        self._buffer.stamp(blocks, named.generation)
        return blocks

    def _readable(self, named: NamedBlocks) -> list[BlockId] | None:
        try:
            blocks = spelt_out(named.runs, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("read of generation %d refused: %s", named.generation, error)
            return None
        return blocks if self._buffer.is_stamped(blocks, named.generation) else None

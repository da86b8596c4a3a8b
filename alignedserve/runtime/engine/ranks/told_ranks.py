"""The ranks beside the first, told by commands of one frame per step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swaps
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.engine.ranks.rank_commands import (
    AppendBlocks,
    Command,
    CopyBlocks,
    PerformSwaps,
    RemoveSequence,
    ReplaceBlock,
    RunStep,
    SetTokens,
    WriteCopies,
    addition_of,
)
from alignedserve.runtime.engine.steps.step_output import Forced, Slices


class ToldRanks(ABC):
    """Implements RankMirror; how a frame gets to the ranks is a subclass's."""

    def __init__(self) -> None:
        self._told: list[Command] = []
        self._encoder = msgspec.msgpack.Encoder()

    def add_sequence(self, sequence: NewSequence) -> None:
        """See RankMirror."""
        self._told.append(addition_of(sequence))

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """See RankMirror."""
        self._told.append(AppendBlocks(request_id, tuple(block_ids)))

    def copy_blocks(self, sources: Sequence[BlockId]) -> None:
        """See RankMirror."""
        self._told.append(CopyBlocks(tuple(sources)))

    def write_copies(self, targets: Sequence[BlockId]) -> None:
        """See RankMirror."""
        self._told.append(WriteCopies(tuple(targets)))

    def replace_block(self, request_id: RequestId, place: int, block_id: BlockId) -> None:
        """See RankMirror."""
        self._told.append(ReplaceBlock(request_id, place, block_id))

    def remove_sequence(self, request_id: RequestId) -> None:
        """See RankMirror."""
        self._told.append(RemoveSequence(request_id))

    def perform_swaps(self, swaps: Swaps) -> None:
        """Move the ranks' own parts between blocks and host memory."""
        self._told.append(PerformSwaps(swaps))

    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        """See RankMirror."""
        parts = tuple((part[0], part[1]) for part in slices)
        self._told.append(RunStep(parts, tuple(forced.items()), takes_highest))

    def set_tokens(self, token_ids: IntArray) -> None:
        """See RankMirror."""
        self._told.append(SetTokens(tuple(token_ids.tolist())))

    def flush(self) -> None:
        """See RankMirror."""
        payload = self._encoder.encode(self._told)
        self._told.clear()
        self._send(payload)

    @abstractmethod
    def _send(self, payload: bytes) -> None:
        """Send a frame to every rank. Raises ExchangeBroken when one has ended."""

"""What the first stage of a worker tells the others.

Each stage has a table of sequences of its own, for their blocks and their places in them. How many tokens of each are
computed is told with every part of a step: so a part that was computed for nothing leaves no trace.
"""

import msgspec

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.engine.ranks.rank_commands import (
    AddSequence,
    AppendBlocks,
    CopyBlocks,
    PerformSwaps,
    RankCommand,
    RemoveSequence,
    ReplaceBlock,
    WriteCopies,
)


class PartSlice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence in one part of a step."""

    request_id: RequestId
    num_computed: int  # before them
    num_tokens: int  # to compute
    num_known: int  # of the sequence


class RunPart(RankCommand, frozen=True):
    """One pass through the stage's layers, with rows as inputs."""

    slices: tuple[PartSlice, ...]
    wants_all: bool  # the hidden vectors of all tokens, and not of those alone whose logits are needed


class LendBlocks(RankCommand, frozen=True):
    """Blocks of the engine's own that sequences write to until they are given others: sequence, place, block."""

    loans: tuple[tuple[RequestId, int, BlockId], ...]


class SettleLoans(RankCommand, frozen=True):
    """The first slots of blocks that were lent, and the blocks that take them."""

    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


StageCommand = (
    AddSequence
    | AppendBlocks
    | ReplaceBlock
    | RemoveSequence
    | CopyBlocks
    | WriteCopies
    | PerformSwaps
    | LendBlocks
    | SettleLoans
    | RunPart
)

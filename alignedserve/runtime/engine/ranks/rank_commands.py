"""What the first rank of a worker tells the others, so that their engines make the same steps.

Each rank has a table of sequences of its own and plans each step from it, which takes the others no longer than the
first; tokens alone come from rank 0, which samples."""

from dataclasses import replace

import msgspec

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import LoraAdapter, SamplingParams
from alignedserve.messages.iterations import Swaps
from alignedserve.runtime.attention.sequence_table import NewSequence
from kernels.lora import AdapterMatrices


class RankCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the commands, which are performed in the order in which they were given."""


class AddSequence(RankCommand, frozen=True):
    """A sequence, as NewSequence."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # prompt, then what has been generated so far
    prompt_len: int
    num_cached: int  # leading tokens whose keys and values lie in the blocks
    block_ids: tuple[BlockId, ...]  # of every rank
    sampling: SamplingParams  # without a grammar
    is_hidden: bool  # its blocks hold layer inputs
    is_reversed: bool  # it fills its blocks from the last slot to the first
    adapter: LoraAdapter | None  # that it is computed with

    def sequence(self, adapter: AdapterMatrices | None = None) -> NewSequence:
        return NewSequence(
            self.request_id,
            self.token_ids,
            self.prompt_len,
            self.num_cached,
            self.block_ids,
            self.sampling,
            is_hidden=self.is_hidden,
            is_reversed=self.is_reversed,
            adapter=adapter,
        )


class AppendBlocks(RankCommand, frozen=True):
    """More blocks of a sequence."""

    request_id: RequestId
    block_ids: tuple[BlockId, ...]  # behind those that it has


class ReplaceBlock(RankCommand, frozen=True):
    """A block that a sequence reads in place of another with the same content."""

    request_id: RequestId
    place: int  # in its block table
    block_id: BlockId


class RemoveSequence(RankCommand, frozen=True):
    """A sequence that has ended or is preempted."""

    request_id: RequestId


class CopyBlocks(RankCommand, frozen=True):
    """Blocks to be read now and written by the next WriteCopies."""

    sources: tuple[BlockId, ...]


class WriteCopies(RankCommand, frozen=True):
    """The blocks that take what CopyBlocks read."""

    targets: tuple[BlockId, ...]


class PerformSwaps(RankCommand, frozen=True):
    """Moves between blocks and host memory."""

    swaps: Swaps


class SetTokens(RankCommand, frozen=True):
    """The tokens that rank 0 chose in the latest step."""

    token_ids: tuple[int, ...]  # by sampled row, in the step's order; -1: none, its logits were not numbers


class RunStep(RankCommand, frozen=True):
    """One step of the engine."""

    slices: tuple[tuple[RequestId, int], ...]  # tokens to compute of each sequence
    forced: tuple[tuple[RequestId, tuple[int, ...]], ...]  # tokens that sequences get before the step
    takes_highest: bool  # the highest logits of its rows are all that is asked for


Command = (
    AddSequence
    | AppendBlocks
    | ReplaceBlock
    | RemoveSequence
    | CopyBlocks
    | WriteCopies
    | PerformSwaps
    | SetTokens
    | RunStep
)


def addition_of(sequence: NewSequence) -> AddSequence:
    return AddSequence(
        sequence.request_id,
        sequence.token_ids,
        sequence.prompt_len,
        sequence.num_cached,
        sequence.block_ids,
        replace(sequence.sampling, grammar=""),
        sequence.is_hidden,
        sequence.is_reversed,
        sequence.lora,
    )

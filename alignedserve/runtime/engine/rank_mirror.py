"""How the engine of a worker's first rank keeps those of the others at the same steps."""

from collections.abc import Sequence
from typing import Protocol

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.engine.steps.step_output import Forced, Slices


class RankMirror(Protocol):
    """The other ranks of a worker, as its first sees them.

    They do what they are told in the order in which they were, and hear of it at the next `flush`.
    """

    def add_sequence(self, sequence: NewSequence) -> None:
        """Add the sequence, without a grammar: the other ranks sample nothing."""

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """Extend the sequence's block table."""

    def copy_blocks(self, sources: Sequence[BlockId]) -> None:
        """Read these blocks, for the next `write_copies`."""

    def write_copies(self, targets: Sequence[BlockId]) -> None:
        """Write what `copy_blocks` read."""

    def replace_block(self, request_id: RequestId, place: int, block_id: BlockId) -> None:
        """Let the sequence read this block in place of its own."""

    def remove_sequence(self, request_id: RequestId) -> None:
        """Forget the sequence."""

    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        """Compute these slices; `forced`: tokens that sequences get before, `takes_highest`: as in StepLaunch."""

    def set_tokens(self, token_ids: IntArray) -> None:
        """Take the tokens of the latest step, by its sampled rows; see NO_TOKEN."""

    def flush(self) -> None:
        """Send what was told. Raises ExchangeBroken when a rank has ended."""

    def check(self) -> None:
        """Raise ExchangeBroken when a rank has ended: what the latest step gave means nothing then."""

"""How the engine of a worker's first rank keeps the other ranks at the same steps."""

from collections.abc import Sequence
from typing import Protocol

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.streams import Event
from alignedserve.runtime.engine.steps.step import Forced, Slices


class RankMirror(Protocol):
    """The other ranks of a worker. They perform commands in order, and get them with the next `flush`."""

    def add_sequence(self, sequence: NewSequence) -> None:
        """Add the sequence, without a grammar: the other ranks sample nothing."""

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """Extend the sequence's block table."""

    def copy_blocks(self, sources: Sequence[BlockId]) -> None:
        """Read these blocks, for the next `write_copies`."""

    def write_copies(self, targets: Sequence[BlockId]) -> None:
        """Write what `copy_blocks` read."""

    def replace_block(self, request_id: RequestId, index: int, block_id: BlockId) -> None:
        """Let the sequence read this block in place of its own."""

    def remove_sequence(self, request_id: RequestId) -> None:
        """Forget the sequence."""

    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        """Compute these slices; `forced`: tokens that sequences get before, `takes_highest`: as in StepLaunch."""

    def set_tokens(self, token_ids: IntArray) -> None:
        """Take the tokens of the latest step, by its sampled rows; see NO_TOKEN."""

    def flush(self) -> None:
        """Send what was told. Raises ExchangeBroken when a rank has ended."""

    def wait_for(self, event: Event) -> None:
        """Wait until the first rank's device has come to the event, behind a step of all ranks.

        Raises ExchangeBroken when a rank has ended, or has not come for too long: the step's results mean nothing then.
        """


def wait_for_step(event: Event, ranks: RankMirror | None) -> None:
    """Wait until the device has come to the event behind a step. Raises ExchangeBroken as RankMirror.wait_for does.

    `ranks`: the others that compute it; None: there are none.
    """
    if ranks is None:
        event.synchronize()
    else:
        ranks.wait_for(event)

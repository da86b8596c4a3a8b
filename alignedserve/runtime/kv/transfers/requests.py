"""What the asking end of a block transfer asks: the requests worth asking for, and the owner's answers."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerError, PeerLost, ProtocolError
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import BlocksAnswered, NamedBlocks, OpenTransfer, TransferOpened, TransferRefused
from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.kv.block_checksums import PlacedRun, blocks_of, check_target, checked_sums, placed
from alignedserve.runtime.kv.transfers.control import Control
from alignedserve.runtime.kv.transfers.shm_transfer import Incoming, Outgoing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a call that passed the checks of this end."""

    index: int  # in the call
    storage_block_ids: Sequence[BlockId]
    named: NamedBlocks  # the owner's blocks, as many

    @property
    def runs(self) -> list[PlacedRun]:
        """The runs of the owner's blocks, to be summed."""
        return placed(count for _, count in self.named.runs)


def open_with(control: Control, transport: str, layout: BlockLayout) -> TransferOpened:
    """Agree on a transport. Raises HandoffRejected with the owner's reason."""
    control.send(OpenTransfer(transport, layout.digest().hex()))
    match control.receive():
        case TransferOpened() as opened:
            return opened
        case TransferRefused(reason=reason):
            raise HandoffRejected(f"the owner of the blocks refuses: {reason}")
        case _:
            raise ProtocolError("another message than was asked for")


def plan_offload(outgoing: Sequence[Outgoing], num_blocks: int) -> list[Planned]:
    """The requests whose blocks can be written at all, in order."""
    planned = []
    for index, one in enumerate(outgoing):
        try:
            check_target(one.target_block_ids, len(one.storage_block_ids), one.generation, num_blocks)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", one.generation, error)
            continue
        named = NamedBlocks(one.generation, tuple(contiguous_runs(one.target_block_ids)))
        planned.append(Planned(index, one.storage_block_ids, named))
    return planned


def plan_fetch(incoming: Sequence[Incoming], block_size: int, num_blocks: int) -> list[Planned]:
    """The requests whose copy adds up, in order."""
    planned = []
    for index, one in enumerate(incoming):
        copy, room = one.copy, one.storage_block_ids
        try:
            blocks = blocks_of(copy, block_size=block_size, num_targets=len(room), num_blocks=num_blocks)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            continue
        named = NamedBlocks(copy.generation, tuple((run.first_block, run.num_blocks) for run in copy.runs))
        planned.append(Planned(index, room[: len(blocks)], named))
    return planned


def answers(control: Control, planned: Sequence[Planned]) -> tuple[bool, ...]:
    """The owner's answer to a question about these."""
    answer = control.receive()
    if not isinstance(answer, BlocksAnswered) or len(answer.is_held) != len(planned):
        raise ProtocolError("another answer than was asked for")
    return answer.is_held


def blocks_in_order(planned: Sequence[Planned]) -> list[BlockId]:
    """This end's blocks of all requests, as their bytes travel."""
    return [block_id for one in planned for block_id in one.storage_block_ids]


def runs_in_order(planned: Sequence[Planned]) -> list[PlacedRun]:
    """The runs of all requests, as their bytes travel."""
    return [run for one in planned for run in one.runs]


def verifies(copy: BlockCopy, sums: Sequence[int] | None) -> bool:
    """Whether what arrived is this copy (None: nothing did); where it is not, the reason is logged."""
    try:
        checked_sums(copy, sums)
    except HandoffRejected as error:
        logger.warning("fetch of generation %d refused: %s", copy.generation, error)
        return False
    return True


@contextlib.contextmanager
def closing_when_broken(control: Control) -> Iterator[None]:
    """Whatever goes wrong between the two ends in the middle of an exchange is the end of their connection.

    A peer's fault is told as PeerLost.
    """
    try:
        yield
    except PeerError as error:
        control.close()
        raise PeerLost(f"a block transfer broke off: {error}") from error
    except BaseException:
        control.close()
        raise

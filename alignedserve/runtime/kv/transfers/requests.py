"""The client's requests to a block server: plans requests that can succeed, and receives the owner's answers."""

import abc
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerError, PeerLost, ProtocolError
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import BlocksAnswered, NamedBlocks, OpenTransfer, TransferOpened, TransferRefused
from alignedserve.messages.caches import BlockRun
from alignedserve.runtime.kv.block_checksums import (
    check_target,
    runs_with_checksums,
    source_blocks,
)
from alignedserve.runtime.kv.block_runs import BlockRuns, PlacedRuns, as_ids, join_placed, place_runs
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.channels.control_socket import ControlSocket
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, verified

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a call that passed the client's checks."""

    index: int  # in the call
    storage_block_ids: Sequence[BlockId]
    named: NamedBlocks  # the owner's blocks, as many
    num_before: int = 0  # blocks of a prefix before them

    @property
    def runs(self) -> PlacedRuns:
        return place_runs([count for _, count in self.named.runs], self.num_before)


class ServedTransfer(abc.ABC):
    """KVTransfer to a block server, whose connection is opened by a subclass, which also moves the bytes.

    After PeerLost the object is unusable: make a new one.
    """

    _storage: BlockStorage
    _control: ControlSocket
    _num_blocks: int  # of the server

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        planned = plan_offload(requests, self._num_blocks)
        done: list[tuple[BlockRun, ...] | None] = [None] * len(requests)
        if planned:
            with closing_on_error(self._control):
                sent = self._offload(planned)
            for one, checksums in zip(planned, sent, strict=True):
                if checksums is not None:
                    done[one.index] = runs_with_checksums(BlockRuns.named(one.named.runs), checksums)
        return done

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        return verified(requests, self.fetch_unverified(requests))

    def fetch_unverified(self, requests: Sequence[FetchRequest]) -> list[list[int] | None]:
        planned = plan_fetch(requests, self._storage.layout, self._num_blocks)
        done: list[list[int] | None] = [None] * len(requests)
        if planned:
            with closing_on_error(self._control):
                received = self._fetch(planned)
            for one, checksums in zip(planned, received, strict=True):
                done[one.index] = checksums
                if checksums is None:
                    logger.warning("fetch of generation %d refused: the lease is no longer valid", one.named.generation)
        return done

    def close(self) -> None:
        self._control.close()

    @abc.abstractmethod
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        """Return the checksums of each request's sent runs; None: the server refused it."""

    @abc.abstractmethod
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        """Return the checksums of each request's received runs; None: the server no longer holds the blocks."""

    def _granted(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        return [one for one, held in zip(planned, receive_answers(self._control, planned), strict=True) if held]

    def _settled(
        self, planned: Sequence[PlannedRequest], granted: Sequence[PlannedRequest], checksums: Sequence[int]
    ) -> list[list[int] | None]:
        in_order = iter(checksums)
        by_index = {one.index: list(islice(in_order, len(one.named.runs))) for one in granted}
        is_held = receive_answers(self._control, planned)
        return [by_index.get(one.index) if held else None for one, held in zip(planned, is_held, strict=True)]


def negotiate(control: ControlSocket, transport: str, storage: BlockStorage) -> TransferOpened:
    """Agree on a transport, and on the part that this end copies. Raises HandoffRejected with the owner's reason."""
    part = storage.part
    control.send(OpenTransfer(transport, part.whole(storage.layout).digest().hex(), part.rank, part.size))
    match control.receive():
        case TransferOpened() as opened:
            return opened
        case TransferRefused(reason=reason):
            raise HandoffRejected(f"the owner of the blocks refuses: {reason}")
        case _:
            raise ProtocolError("the owner of the blocks sent another message than an answer")


def plan_offload(requests: Sequence[OffloadRequest], num_blocks: int) -> list[PlannedRequest]:
    planned = []
    for index, one in enumerate(requests):
        try:
            check_target(as_ids(one.target_block_ids), len(one.storage_block_ids), one.generation, num_blocks)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", one.generation, error)
            continue
        named = NamedBlocks(one.generation, one.runs.pairs())
        planned.append(PlannedRequest(index, one.storage_block_ids, named, one.num_before or 0))
    return planned


def plan_fetch(requests: Sequence[FetchRequest], layout: BlockLayout, num_blocks: int) -> list[PlannedRequest]:
    planned = []
    for index, one in enumerate(requests):
        copy, targets = one.copy, one.storage_block_ids
        try:
            blocks = source_blocks(copy, layout=layout, num_targets=len(targets), num_blocks=num_blocks)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            continue
        named = NamedBlocks(copy.generation, tuple((run.first_block, run.num_blocks) for run in copy.runs))
        planned.append(PlannedRequest(index, targets[: len(blocks)], named, copy.num_before))
    return planned


def receive_answers(control: ControlSocket, planned: Sequence[PlannedRequest]) -> tuple[bool, ...]:
    answer = control.receive()
    if not isinstance(answer, BlocksAnswered) or len(answer.is_held) != len(planned):
        raise ProtocolError(f"the owner of the blocks gave no answer about all {len(planned)} requests")
    return answer.is_held


def blocks_in_order(planned: Sequence[PlannedRequest]) -> list[BlockId]:
    """Return this end's blocks of all requests, in the order in which their bytes travel."""
    return [block_id for one in planned for block_id in one.storage_block_ids]


def runs_in_order(planned: Sequence[PlannedRequest]) -> PlacedRuns:
    """Return the runs of all requests, in the order in which their bytes travel."""
    return join_placed(one.runs for one in planned)


@contextlib.contextmanager
def closing_on_error(control: ControlSocket) -> Iterator[None]:
    """Close the connection on any error in the middle of an exchange; a peer's error becomes PeerLost."""
    try:
        yield
    except PeerError as error:
        control.close()
        raise PeerLost(f"a block transfer broke off: {error}") from error
    except BaseException:
        control.close()
        raise

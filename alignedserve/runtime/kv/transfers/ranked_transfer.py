"""KVTransfer of a worker whose blocks are in the memories of several ranks: each copies its own part of every block.

Each rank has a transfer of its own to the other end, of any kind, to the part of the same rank there. Its checksums are
joined with those of the others: what one rank's part does not hold, is not held at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.block_checksums import joined_checksums, runs_with_checksums
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer, verified
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer, Relayed, relay_unverified, verified_relay
from alignedserve.runtime.kv.transfers.requests import ServedTransfer

Checksums = list[int] | None  # of one request's runs, or of a rank's parts of them; None: it is refused
T = TypeVar("T")
Waited = Callable[[], Sequence[Sequence[Checksums]]]  # waits for each rank's, by request


class PartsOffer(msgspec.Struct, frozen=True):
    """What the ranks of a worker need to reach a peer's blocks."""

    offered: ArenaOffered
    identity: Identity  # of the worker
    stamps: bool  # as in LocalTransfer
    transport: str


class LentParts(NamedTuple):
    """How the ranks beside the first take part in a buffer that their worker lends."""

    offered: ArenaOffered  # of the buffer, which they open where it is an arena
    max_blocks: int  # of all buffers together, where each has parts in the memory of its own device
    addresses: tuple[str, ...]  # of each of these ranks, to serve those at


class PartsLoan(msgspec.Struct, frozen=True):
    """What the ranks beside the first need to lend a peer parts of blocks, each in the memory of its own device."""

    identity: Identity  # of the worker
    num_blocks: int  # of the buffer
    max_blocks: int  # of all buffers together
    transports: tuple[str, ...]
    addresses: tuple[str, ...]  # of each of these ranks, to serve its parts at


@dataclass(frozen=True, slots=True)
class PartsRelay:
    """A copy between two peers' blocks, by each rank of its parts."""

    source: str
    copy: BlockCopy
    target: str
    target_block_ids: Sequence[BlockId]
    generation: int  # of the target blocks


class RankCopies(Protocol):
    """The copies of the other ranks. Those with one peer happen in order; all raise ExchangeBroken if a rank ended.

    What is waited for raises PeerLost when a rank has lost the peer, and only when no rank copies any more.
    """

    def open(self, peer: str, offer: PartsOffer) -> None:
        """Let each open a transfer to its part of the peer's blocks, and wait. Raises TransportUnavailable."""

    def lend(self, peer: str, loan: PartsLoan) -> tuple[str, ...]:
        """Let each lend the peer a buffer of its parts, and return their addresses. Raises NotEnoughMemory."""

    def close(self, peer: str) -> None:
        """Let each leave the peer's blocks, or take back what it lends; ranks that have ended have none."""

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        """Begin to copy each rank's parts out."""

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        """Begin to copy each rank's parts in."""

    def relay(self, thread: str, relay: PartsRelay) -> Waited:
        """Begin to copy each rank's parts, in the order of this one of the two peers; answers as of `Relayed`."""


class RankedTransfer:
    """KVTransfer between ranks and a peer's blocks. A request is held if every rank's part of it is."""

    def __init__(self, own: PartTransfer, ranks: RankCopies, peer: str) -> None:
        """`own`: of the first rank."""
        self.own = own
        self.peer = peer
        self._ranks = ranks

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""

        def own() -> list[Checksums]:
            sent = self.own.offload(requests)
            return [None if runs is None else [run.checksum for run in runs] for runs in sent]

        parts = _copied(own, self._ranks.offload(self.peer, requests))
        return [
            None if checksums is None else runs_with_checksums(request.runs, checksums)
            for request, checksums in zip(requests, _joined(*parts), strict=True)
        ]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        """See KVTransfer."""
        others = self._ranks.fetch(self.peer, requests)
        parts = _copied(lambda: self.own.fetch_unverified(requests), others)
        return verified(requests, _joined(*parts))

    def close(self) -> None:
        """See KVTransfer."""
        self._ranks.close(self.peer)
        leave(self.own)

    def relay_to(
        self,
        target: "RankedTransfer",
        copy: BlockCopy,
        target_block_ids: Sequence[BlockId],
        generation: int,
        thread: str,
    ) -> tuple[BlockRun, ...] | None:
        """Copy a request's blocks from this memory to another one that each rank reaches, as `relay` does.

        `thread`: the one of the two peers in whose order it is.
        """
        source, there = self.own, target.own
        if not isinstance(source, LocalTransfer) or not isinstance(there, LocalTransfer):
            return None
        others = self._ranks.relay(thread, PartsRelay(self.peer, copy, target.peer, target_block_ids, generation))
        own, of_others = _copied(lambda: relay_unverified(source, copy, there, target_block_ids, generation), others)
        if own is None:
            return None
        read, written = _joined(own, of_others)
        return verified_relay(Relayed(read, written), copy, there, target_block_ids)


def leave(transfer: PartTransfer) -> None:
    """Close a transfer's connection; what is mapped is unmapped when its last user, a relay perhaps, drops it."""
    if isinstance(transfer, ServedTransfer):
        transfer.close()


def _copied(own: Callable[[], T], others: Waited) -> tuple[T, Sequence[Sequence[Checksums]]]:
    """Copy the first rank's parts while the others copy theirs; return what was copied by it, and by them."""
    try:
        copied = own()
    finally:
        of_others = others()  # whatever is raised: none may copy any more afterwards
    return copied, of_others


def _joined(own: Sequence[Checksums], others: Sequence[Sequence[Checksums]]) -> list[Checksums]:
    joined: list[Checksums] = []
    for of_ranks in zip(own, *others, strict=True):
        held = [checksums for checksums in of_ranks if checksums is not None]
        joined.append(joined_checksums(held) if len(held) == len(of_ranks) else None)
    return joined

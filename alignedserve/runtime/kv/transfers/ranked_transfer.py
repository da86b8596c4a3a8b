"""KVTransfer of a worker whose blocks are in the memories of several ranks: each copies its own part of every block.

Each rank has a transfer of its own to the part of the same number in memory of a host, where the parts of a block lie
one after another. Its checksums are joined with those of the others: what one rank's part does not hold, is not held
at all."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.block_checksums import joined_checksums, runs_with_checksums
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer, verified
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer, Relayed, relay_unverified, verified_relay
from alignedserve.runtime.kv.transfers.requests import ServedTransfer

Checksums = list[int] | None  # of one request's runs, or of a rank's parts of them; None: it is refused
Waited = Callable[[], Sequence[Sequence[Checksums]]]  # waits for each rank's, by request


class PartsOffer(msgspec.Struct, frozen=True):
    """What the ranks of a worker need to reach a peer's blocks."""

    offered: ArenaOffered
    identity: Identity  # of the worker
    stamps: bool  # as in LocalTransfer
    transport: str


class RankCopies(Protocol):
    """The copies of the other ranks. Those with one peer happen in order; all raise ExchangeBroken if a rank ended.
    What is waited for raises PeerLost when a rank has lost the peer, and only when no rank copies any more."""

    size: int  # of the worker, the first rank included

    def open(self, peer: str, offer: PartsOffer) -> None:
        """Let each open a transfer to its part of the peer's blocks, and wait. Raises TransportUnavailable."""

    def close(self, peer: str) -> None:
        """Let each leave the peer's blocks; ranks that have ended have none."""

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        """Begin to copy each rank's parts out."""

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        """Begin to copy each rank's parts in."""


class RankedTransfer:
    """KVTransfer between ranks and a peer's blocks. A request is held if every rank's part of it is."""

    def __init__(self, transfer: PartTransfer, ranks: RankCopies, peer: str) -> None:
        self.own = transfer
        self.peer = peer
        self._ranks = ranks

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        def own() -> list[Checksums]:
            sent = self.own.offload(requests)
            return [None if runs is None else [run.checksum for run in runs] for runs in sent]

        parts = _copied(own, self._ranks.offload(self.peer, requests))
        return [
            None if checksums is None else runs_with_checksums(request.runs, checksums)
            for request, checksums in zip(requests, _joined(parts), strict=True)
        ]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        others = self._ranks.fetch(self.peer, requests)
        return verified(requests, _joined(_copied(lambda: self.own.fetch_unverified(requests), others)))

    def close(self) -> None:
        self._ranks.close(self.peer)
        leave(self.own)

    def relay_to(
        self, target: "RankedTransfer", copy: BlockCopy, target_block_ids: Sequence[BlockId], generation: int
    ) -> tuple[BlockRun, ...] | None:
        source, there = self.own, target.own
        if not isinstance(source, LocalTransfer) or not isinstance(there, LocalTransfer):
            return None
        parts = [
            relay_unverified(source, copy, there, target_block_ids, generation, ArenaPart(rank, self._ranks.size))
            for rank in range(self._ranks.size)
        ]
        held = [part for part in parts if part is not None]
        if len(held) < len(parts):
            return None
        joined = Relayed(joined_checksums([one.read for one in held]), joined_checksums([one.written for one in held]))
        return verified_relay(joined, copy, there, target_block_ids)


def leave(transfer: PartTransfer) -> None:
    """Close a transfer's connection; what is mapped is unmapped when its last user, a relay perhaps, drops it."""
    if isinstance(transfer, ServedTransfer):
        transfer.close()


def _copied(copy_part: Callable[[], list[Checksums]], others: Waited) -> list[Sequence[Checksums]]:
    try:
        copied = copy_part()
    finally:
        of_others = others()  # whatever is raised: none may copy any more afterwards
    return [copied, *of_others]


def _joined(ranks: Sequence[Sequence[Checksums]]) -> list[Checksums]:
    joined: list[Checksums] = []
    for of_ranks in zip(*ranks, strict=True):
        held = [checksums for checksums in of_ranks if checksums is not None]
        joined.append(joined_checksums(held) if len(held) == len(of_ranks) else None)
    return joined

"""KVTransfer of a worker whose blocks are in the memories of several ranks: each copies its own part of every block."""

from collections.abc import Callable, Sequence
from typing import Protocol

from alignedserve.messages.caches import ArenaOffered, BlockRun
from alignedserve.runtime.kv.block_checksums import is_verified, joined_checksums, runs_with_checksums
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer

Checksums = list[int] | None  # of one request's runs, or of a rank's parts of them; None: it is refused
Waited = Callable[[], Sequence[Sequence[Checksums]]]  # waits for each rank's, by request; raises ExchangeBroken


class RankCopies(Protocol):
    """The copies of the other ranks. Those with one peer happen in order; all raise ExchangeBroken if a rank ended."""

    def open(self, peer: str, offered: ArenaOffered) -> None:
        """Let each map its part of the peer's blocks. One that cannot refuses what it is asked for."""

    def close(self, peer: str) -> None:
        """Let each leave the peer's blocks; ranks that have ended have none."""

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        """Begin to copy each rank's parts out."""

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        """Begin to copy each rank's parts in."""


class RankedTransfer:
    """KVTransfer between ranks and blocks on the host. A request is held if every rank's part of it is."""

    def __init__(self, own: LocalTransfer, ranks: RankCopies, peer: str) -> None:
        """`own`: of the first rank."""
        self._own = own
        self._ranks = ranks
        self._peer = peer

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        others = self._ranks.offload(self._peer, requests)
        sent = self._own.offload(requests)
        own = [None if runs is None else [run.checksum for run in runs] for runs in sent]
        return [
            None if checksums is None else runs_with_checksums(request.runs, checksums)
            for request, checksums in zip(requests, _joined(own, others()), strict=True)
        ]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        """See KVTransfer."""
        others = self._ranks.fetch(self._peer, requests)
        own = self._own.fetch_unverified(requests)
        return [
            checksums is not None and is_verified(request.copy, checksums)
            for request, checksums in zip(requests, _joined(own, others()), strict=True)
        ]

    def close(self) -> None:
        """See KVTransfer."""
        self._ranks.close(self._peer)


def _joined(own: Sequence[Checksums], others: Sequence[Sequence[Checksums]]) -> list[Checksums]:
    joined: list[Checksums] = []
    for of_ranks in zip(own, *others, strict=True):
        held = [checksums for checksums in of_ranks if checksums is not None]
        joined.append(joined_checksums(held) if len(held) == len(of_ranks) else None)
    return joined

"""Copies of blocks of stages that are on several hosts: there are none."""

from collections.abc import Sequence

from alignedserve.core.errors import TransportUnavailable
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, Waited

_REASON = "each stage of this worker has its part of the blocks on a host of its own"


class NoCopies:
    """Implements RankCopies: refuses by name."""

    def __init__(self, size: int) -> None:
        self.size = size

    def open(self, peer: str, offer: PartsOffer) -> None:
        raise TransportUnavailable(_REASON)

    def close(self, peer: str) -> None: ...

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        raise AssertionError("a transfer that was not opened")

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        raise AssertionError("a transfer that was not opened")

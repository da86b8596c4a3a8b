"""The KVTransfer port: copies of whole blocks between a worker's storage and blocks that other processes see.

A receiver checks bounds, lengths, generation and checksums, and fails closed: a handoff that does not verify is a cache
miss and becomes a recompute, never a wrong token.

A worker that was stopped while it wrote may continue after its lease was revoked, into blocks that belong to another
request by then. So checksums are never computed from shared blocks: the sender computes them from its own blocks, the
receiver from what has arrived in its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_checksums import is_verified
from alignedserve.runtime.kv.block_runs import BlockRuns


@dataclass(frozen=True, slots=True)
class OffloadRequest:
    """One request's blocks to copy out of a storage."""

    storage_block_ids: Sequence[BlockId]
    target_block_ids: Sequence[BlockId]  # as many
    generation: int  # of the lease on the target blocks
    num_before: int | None = None  # they follow so many blocks of a prefix, and each is summed by itself

    @property
    def runs(self) -> BlockRuns:
        """The target blocks by what is summed: runs of neighbours, or each by itself. Raises HandoffRejected."""
        return BlockRuns.of(self.target_block_ids, is_by_block=self.num_before is not None)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One request's copy to fetch into a storage."""

    copy: BlockCopy
    storage_block_ids: Sequence[BlockId]  # at least as many as the copy has


class KVTransfer(Protocol):
    """Copies whole blocks, one request after the other. Blocking; called from one thread of a worker at a time. A
    refused request is logged with its reason and does not affect the others. Both methods raise PeerLost when the owner
    of the blocks is gone; the outcome of every request of that call is then unknown. Shared memory outlives its owner:
    for such transfers the links notice the loss."""

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        """Copy out and return the runs with their checksums; None: refused, and the target blocks are undefined."""

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        """Copy in and verify. False: it does not verify, and its storage blocks are undefined."""

    def close(self) -> None:
        """Disconnect from the other end. May be repeated; no other method may be called after it."""


class PartTransfer(KVTransfer, Protocol):
    """KVTransfer of the blocks of one rank, which may be parts of its worker's: their checksums hold when joined."""

    def fetch_unverified(self, requests: Sequence[FetchRequest]) -> list[list[int] | None]:
        """Copy in and return the checksums of each request's runs as they arrived; None: it is refused."""


def verified(requests: Sequence[FetchRequest], arrived: Sequence[list[int] | None]) -> list[bool]:
    """Return whether each request's checksums are those of its copy; None: it was refused, which is logged before."""
    return [
        checksums is not None and is_verified(request.copy, checksums)
        for request, checksums in zip(requests, arrived, strict=True)
    ]


AUTO, SHM, CUDA_IPC = "auto", "shm", "cuda_ipc"
FASTEST_FIRST = (CUDA_IPC, SHM, "tcp", "gloo")
TRANSPORTS = (AUTO, *FASTEST_FIRST)


def lends_device_memory(engine: EngineConfig) -> bool:
    """Return whether workers that compute on a GPU have their candidate buffers there."""
    return engine.kv_transport in (AUTO, CUDA_IPC) and engine.tensor_parallel == 1


def check_transport(engine: EngineConfig) -> None:
    """Check that there is a way from worker to worker. Raises ConfigError."""
    if engine.kv_transport == CUDA_IPC and engine.tensor_parallel > 1:
        raise ConfigError(
            "engine.kv_transport is cuda_ipc, which moves blocks between GPUs, but those of several ranks go through "
            "the host's memory; leave it out"
        )

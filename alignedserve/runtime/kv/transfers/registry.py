"""The choice of a transport for blocks: the fastest that both ends have, or the configured one."""

import logging
from collections.abc import Callable

import torch

from alignedserve.core.errors import HandoffRejected, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO, FASTEST_FIRST, TRANSPORTS, PartTransfer
from alignedserve.runtime.kv.transfers.local_transfer import open_shm_transfer
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, IpcTransfer

logger = logging.getLogger(__name__)

_Opener = Callable[[ArenaOffered, BlockStorage, Identity, bool], PartTransfer]


def open_transfer(
    offered: ArenaOffered, storage: BlockStorage, *, identity: Identity, stamps: bool, transport: str = AUTO
) -> PartTransfer:
    """Open a transfer to the offered blocks, or to the storage's part of each; `stamps` as in ShmTransfer. Raises
    TransportUnavailable naming the reason for each transport that was tried, PeerLost."""
    if transport not in TRANSPORTS:
        raise TransportUnavailable(f"unknown transport {transport!r}; there are {', '.join(TRANSPORTS)}")
    reasons = []
    for name in FASTEST_FIRST if transport == AUTO else (transport,):
        reason = _obstacle(name, offered, storage)
        if reason is None:
            try:
                opened = _OPENERS[name](offered, storage, identity, stamps)
            except HandoffRejected as error:
                reason = str(error)
            else:
                logger.info("blocks at %s are reached by %s", offered.served_at or offered.path, name)
                return opened
        reasons.append(f"{name}: {reason}")
    raise TransportUnavailable(f"no transport reaches the offered blocks ({'; '.join(reasons)})")


def available_transports(*, has_device: bool) -> tuple[str, ...]:
    """List the transports of a process, with blocks on a device or on the host, fastest first."""
    has = {"cuda_ipc": has_device, "shm": True, "tcp": True, "gloo": torch.distributed.is_gloo_available()}
    return tuple(name for name in FASTEST_FIRST if has[name])


def _obstacle(name: str, offered: ArenaOffered, storage: BlockStorage) -> str | None:
    if name not in offered.transports:
        return "the other end does not offer it"
    if name not in available_transports(has_device=storage.lanes is not None):
        return "this end does not have it"
    if name == "shm":
        return None if offered.path else "the blocks are in no file"
    if not offered.served_at:
        return "the blocks are served nowhere"
    if name == "cuda_ipc" and not offered.served_at.startswith("unix:"):
        return "the blocks are on another host"
    return None


def _open_shm(offered: ArenaOffered, storage: BlockStorage, identity: Identity, stamps: bool) -> PartTransfer:
    return open_shm_transfer(offered, storage, stamps=stamps)


def _open_channel(name: str) -> _Opener:
    def opened(offered: ArenaOffered, storage: BlockStorage, identity: Identity, stamps: bool) -> PartTransfer:
        return ChannelTransfer(storage, offered.served_at, identity=identity, transport=name)

    return opened


def _open_ipc(offered: ArenaOffered, storage: BlockStorage, identity: Identity, stamps: bool) -> PartTransfer:
    assert stamps, "blocks on a device are a candidate buffer, in which the writer stamps"
    assert storage.lanes is not None, "a transport between devices"
    return IpcTransfer(storage, offered.served_at, identity=identity, lanes=storage.lanes)


_OPENERS: dict[str, _Opener] = {
    "cuda_ipc": _open_ipc,
    "shm": _open_shm,
    "tcp": _open_channel("tcp"),
    "gloo": _open_channel("gloo"),
}

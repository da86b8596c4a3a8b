"""The channel of a transport, once both ends have agreed on it."""

import torch

from alignedserve.runtime.kv.transfers.block_channel import BlockChannel
from alignedserve.runtime.kv.transfers.block_stream import BlockStream
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket
from alignedserve.runtime.kv.transfers.process_pair import make_pair


def open_channel(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float, device: torch.device
) -> BlockChannel:
    """Return the channel to the other end of this connection. Raises PeerLost."""
    if transport == "tcp":
        return BlockStream(control, block_bytes)
    return make_pair(control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s, device=device)

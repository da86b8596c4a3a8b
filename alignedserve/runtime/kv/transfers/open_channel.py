"""The channel of any transport, once both ends have agreed on it."""

from typing import Any

import torch

from alignedserve.runtime.kv.transfers.block_channel import BlockChannel
from alignedserve.runtime.kv.transfers.channel_opener import open_stream
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket
from alignedserve.runtime.kv.transfers.process_pair import make_pair


def open_channel(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float, device: Any
) -> BlockChannel:
    """See ChannelOpener. `device`: of the blocks; on the CPU, but with nccl."""
    if transport == "tcp":
        return open_stream(
            control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s, device=device
        )
    on = torch.device(device if transport == "nccl" else "cpu")
    return make_pair(control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s, device=on)

"""The channel of any transport, once both ends have agreed on it."""

from alignedserve.runtime.kv.transfers.channels.block_channel import BlockChannel
from alignedserve.runtime.kv.transfers.channels.channel_opener import open_stream
from alignedserve.runtime.kv.transfers.channels.control_socket import ControlSocket
from alignedserve.runtime.kv.transfers.channels.process_pair import make_pair


def open_channel(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
) -> BlockChannel:
    if transport == "tcp":
        return open_stream(control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s)
    return make_pair(control, rank, block_bytes=block_bytes, timeout_s=timeout_s)

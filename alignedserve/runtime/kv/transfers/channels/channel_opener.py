"""Opens a channel once both ends have agreed on its transport; the way over a stream needs no torch."""

from typing import Protocol

from alignedserve.runtime.kv.transfers.channels.block_channel import BlockChannel
from alignedserve.runtime.kv.transfers.channels.block_stream import BlockStream
from alignedserve.runtime.kv.transfers.channels.control_socket import ControlSocket


class ChannelOpener(Protocol):
    """Opens the channel of a transport."""

    def __call__(
        self, control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
    ) -> BlockChannel:
        """Return the channel to the other end of this connection. Raises PeerLost."""


def open_stream(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
) -> BlockChannel:
    assert transport == "tcp", "another transport than a stream is served"
    return BlockStream(control, block_bytes)

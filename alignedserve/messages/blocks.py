"""Messages between the two ends of a block transfer; the bytes of the blocks follow on the same connection.

The owner of the blocks listens, the client asks, one message at a time. A message names blocks of several requests;
each of them is answered by itself.
"""

from typing import Annotated

import msgspec

from alignedserve.messages.fields import Count, Text
from alignedserve.messages.wire import Message

Opaque = Annotated[bytes, msgspec.Meta(max_length=4096)]


class OpenTransfer(Message, frozen=True):
    """Client to owner, first message: the transport to use. Answered by TransferOpened or TransferRefused."""

    transport: Text
    layout_digest: Text  # of the client's whole blocks; must equal the owner's
    rank: Count = 0  # of the client among its worker's, which copies its part of each block
    num_ranks: Count = 1  # of its worker, which copy a part each


class DeviceMemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """Handle by which another process of this machine maps CUDA memory: what driver and torch need, no pickle."""

    device_uuid: Text  # processes may number the devices differently
    handle: Opaque  # CUDA IPC handle of the allocation
    storage_bytes: Count
    storage_offset: Count  # of the storage in the allocation, in bytes
    counter_handle: Opaque  # torch's reference count of mappings
    counter_offset: Count
    event_handle: Opaque
    event_is_awaited: bool


class TransferOpened(Message, frozen=True):
    """Owner to client: accepted. Pairwise transports are then connected by RendezvousValues."""

    num_blocks: Count  # of the owner
    device_memory: DeviceMemoryHandle | None = None  # how to map them (cuda_ipc)


class TransferRefused(Message, frozen=True):
    """Owner to client: this transport is refused; the connection ends."""

    reason: Text


class RendezvousValue(Message, frozen=True):
    """Either way while a pair connects: one entry of its store (addresses, ids) for the other end."""

    key: Text
    value: Opaque


class NamedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one request in order, and the generation that they have or are to get."""

    generation: Count
    runs: tuple[tuple[Count, Count], ...]  # (first block, number of blocks)


class WriteBlocks(Message, frozen=True):
    """Client to owner: the bytes of all these follow. Answered by BlocksAnswered once they are written or refused."""

    requests: tuple[NamedBlocks, ...]


class ReadBlocks(Message, frozen=True):
    """Client to owner: send these. BlocksAnswered comes before the bytes of valid blocks, and once more after them."""

    requests: tuple[NamedBlocks, ...]


class BlocksCopied(Message, frozen=True):
    """Client to owner, which copies by itself (cuda_ipc): done. Answered by BlocksAnswered once more."""


class BlocksAnswered(Message, frozen=True):
    """Owner to client: for each request of the message, True if its blocks were, and still are, its own."""

    is_held: tuple[bool, ...]


BlockServerInbound = OpenTransfer | RendezvousValue | WriteBlocks | ReadBlocks | BlocksCopied
BlockClientInbound = TransferOpened | TransferRefused | RendezvousValue | BlocksAnswered

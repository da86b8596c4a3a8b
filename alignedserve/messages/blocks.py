"""What the two ends of a block transfer say to each other; the bytes of the blocks go beside it, between the same two.

The owner of the blocks listens, the other end asks, one question at a time. A question names blocks of several
requests; each request is answered for itself.
"""

from typing import Annotated

import msgspec

from alignedserve.messages.fields import Count, Text
from alignedserve.messages.wire import Message

Opaque = Annotated[bytes, msgspec.Meta(max_length=4096)]


class OpenTransfer(Message, frozen=True):
    """Asking end, first message: how the bytes shall go. Answered by TransferOpened or TransferRefused."""

    transport: Text
    layout_digest: Text  # of the asking end's blocks, which must be the owner's


class DeviceMemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """How another process of this machine maps memory of a CUDA device: what the driver and torch need, no pickle."""

    device_uuid: Text  # processes may number the devices differently
    handle: Opaque  # CUDA IPC handle of the allocation
    storage_bytes: Count
    storage_offset: Count  # of the storage in the allocation, in bytes
    counter_handle: Opaque  # torch's count of who still maps it
    counter_offset: Count
    event_handle: Opaque
    event_is_awaited: bool


class TransferOpened(Message, frozen=True):
    """Owner: agreed. Pairwise transports are now put together by RendezvousValues."""

    num_blocks: Count  # that the owner has
    device_memory: DeviceMemoryHandle | None = None  # how to map them (cuda_ipc)


class TransferRefused(Message, frozen=True):
    """Owner: not like this; the connection ends."""

    reason: Text


class RendezvousValue(Message, frozen=True):
    """Either way while a pair is put together: one entry of its store (addresses, ids), meant for the other end."""

    key: Text
    value: Opaque


class NamedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one request in order, and the generation that they carry or are to carry."""

    generation: Count
    runs: tuple[tuple[Count, Count], ...]  # (first block, number of blocks)


class WriteBlocks(Message, frozen=True):
    """Asking end: the bytes of all these follow. Answered by BlocksAnswered when they are in (or were refused)."""

    requests: tuple[NamedBlocks, ...]


class ReadBlocks(Message, frozen=True):
    """Asking end: send these. BlocksAnswered comes before the bytes of those that hold, and once more after them."""

    requests: tuple[NamedBlocks, ...]


class BlocksCopied(Message, frozen=True):
    """Asking end that copied by itself (cuda_ipc): done. Answered by BlocksAnswered once more."""


class BlocksAnswered(Message, frozen=True):
    """Owner: which requests' blocks were (and still are) theirs, one for each request of the question."""

    is_held: tuple[bool, ...]


BlockServerInbound = OpenTransfer | RendezvousValue | WriteBlocks | ReadBlocks | BlocksCopied
BlockClientInbound = TransferOpened | TransferRefused | RendezvousValue | BlocksAnswered

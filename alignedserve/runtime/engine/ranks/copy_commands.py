"""What the first rank of a worker tells the others of copies, over a connection beside that of steps."""

import msgspec

from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer


class OpenBlocks(msgspec.Struct, frozen=True, tag=True):
    """Open a transfer to this rank's part of a peer's blocks, in place of any before."""

    peer: str
    offer: PartsOffer


class CloseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Leave a peer's blocks."""

    peer: str


class OffloadParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts out."""

    peer: str
    requests: tuple[OffloadRequest, ...]


class FetchParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts in."""

    peer: str
    requests: tuple[FetchRequest, ...]


CopyCommand = OpenBlocks | CloseBlocks | OffloadParts | FetchParts


class OrderedCopy(msgspec.Struct, frozen=True):
    """A command to one rank."""

    number: int  # of the command, for its answer
    num_frames: int  # of steps, which the rank has performed before: swaps of the same blocks are among them
    command: CopyCommand


class CopyDone(msgspec.Struct, frozen=True):
    """The answer."""

    number: int
    checksums: tuple[list[int] | None, ...] = ()  # of each request's runs, of this rank's parts; None: it is refused
    refusal: str = ""  # why nothing was opened
    is_lost: bool = False  # the peer is, and what was copied is unknown

"""What the first rank of a worker tells the others of copies, over a connection beside that of steps."""

import msgspec

from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsLoan, PartsOffer, PartsRelay


class OpenBlocks(msgspec.Struct, frozen=True, tag=True):
    """Open a transfer to this rank's part of a peer's blocks, in place of any before."""

    peer: str
    offer: PartsOffer


class LendBlocks(msgspec.Struct, frozen=True, tag=True):
    """Lend a peer a buffer of this rank's parts of blocks, in place of any before."""

    peer: str
    loan: PartsLoan


class CloseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Leave a peer's blocks, or take back what it was lent."""

    peer: str


class OffloadParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts out."""

    peer: str
    requests: tuple[OffloadRequest, ...]


class FetchParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts in."""

    peer: str
    requests: tuple[FetchRequest, ...]


class RelayParts(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's parts from one peer's blocks to another's."""

    peer: str  # in whose order it is
    relay: PartsRelay


CopyCommand = OpenBlocks | LendBlocks | CloseBlocks | OffloadParts | FetchParts | RelayParts


class OrderedCopy(msgspec.Struct, frozen=True):
    """A command to one rank."""

    number: int  # of the command, for its answer
    num_frames: int  # of steps, which the rank has performed before: swaps of the same blocks are among them
    command: CopyCommand


class CopyDone(msgspec.Struct, frozen=True):
    """The answer."""

    number: int
    checksums: tuple[list[int] | None, ...] = ()  # of each request's runs, of this rank's parts; None: it is refused
    address: str = ""  # where it serves what it lends
    refusal: str = ""  # why nothing was opened, or lent
    is_lost: bool = False  # the peer is, and what was copied is unknown

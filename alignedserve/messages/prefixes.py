"""Messages about blocks of the prefix cache (alignedserve/prefix_cache).

To the router go truncated hashes: hints for placement, never trusted. Between a worker and a pool, of its node or of
another, go whole ones with the blocks' tokens, so that every reader verifies what it loads. The blocks themselves never
travel in a message.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.request import PREFIX_ROOT_BYTES
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.fields import Count
from alignedserve.messages.wire import Message

BLOCK_NAME_BYTES = 8
HASH_BYTES = PREFIX_ROOT_BYTES
MAX_BLOCKS = 1 << 16  # in one message
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * HASH_BYTES)]  # one after the other
PackedTokens = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]  # 4 bytes a token, as block_hashes packs them

_TOLD = 64  # of 256 values that the last byte of a name has
MAX_BLOCK_NAMES = 1 << 17  # of one request; further blocks have none

BlockName = Annotated[bytes, msgspec.Meta(min_length=BLOCK_NAME_BYTES, max_length=BLOCK_NAME_BYTES)]
BlockNames = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_NAMES * BLOCK_NAME_BYTES)]  # one after the other


class PrefixBlocksChanged(Message, frozen=True):
    """Worker or pool to router, when a prompt is computed or with a tick: changes of its cached blocks, by their names.

    Of four blocks about one is told (`names_told`): the router hears of every worker's, and a run whose end is known to
    two or three blocks places a prompt as well. Removals apply before additions: a block in both is stored.
    """

    stored: tuple[BlockName, ...]
    removed: tuple[BlockName, ...] = ()
    is_complete: bool = False  # it has no others than those stored; sent to a router that is new


def is_told(name: bytes) -> bool:
    """Return whether the router is told of the block with this name; all processes say the same."""
    return name[-1] < _TOLD


def names_told(block_hashes: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the names of those of these blocks that the router is told of."""
    names = [block_hash[:BLOCK_NAME_BYTES] for block_hash in block_hashes]
    return tuple([name for name in names if name[-1] < _TOLD])


def split_names(block_names: bytes) -> Iterator[bytes]:
    """Yield the names of a context's blocks."""
    end = len(block_names) - BLOCK_NAME_BYTES + 1
    return (block_names[at : at + BLOCK_NAME_BYTES] for at in range(0, end, BLOCK_NAME_BYTES))


# --- between a worker and a pool


class PrefixBlock(msgspec.Struct, frozen=True, array_like=True):
    """One full block, by its name and its tokens."""

    block_hash: Hash
    packed_tokens: PackedTokens


class PrefixPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of a context."""

    num_before: Count  # blocks of the context before the first of these
    parent: Hash  # the hash of the one before the first, or the root
    blocks: Annotated[tuple[PrefixBlock, ...], msgspec.Meta(max_length=MAX_BLOCKS)]


class StorePrefixBlocks(Message, frozen=True):
    """Worker to the pool of its node: these blocks are here, to be kept. Answered by PrefixBlocksReserved."""

    parts: Annotated[tuple[PrefixPart, ...], msgspec.Meta(max_length=MAX_BLOCKS)]


class ReservedPart(msgspec.Struct, frozen=True, array_like=True):
    """The answer about one part: its first blocks need nothing, and the next ones are to be written."""

    num_known: Count  # kept here, or being written by another worker
    lease_id: LeaseId = LeaseId(0)  # also the generation of the blocks to write
    block_ids: tuple[BlockId, ...] = ()  # to write; what follows has no place now
    is_orphan: bool = False  # the block before the first is not kept here: offer it first


class PrefixBlocksReserved(Message, frozen=True):
    """Answer to StorePrefixBlocks, part by part. Leases end at their deadline unless PrefixBlocksWritten has come."""

    parts: tuple[ReservedPart, ...]


class PrefixBlocksWritten(Message, frozen=True):
    """Worker to pool: the first blocks of a lease are written; the others, if any, are not."""

    lease_id: LeaseId
    checksums: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_BLOCKS)]  # of each by itself, as in BlockCopy


class FindPrefix(Message, frozen=True):
    """Worker to pool: lend the longest run of these blocks. Answered by PrefixFound."""

    request_id: RequestId
    num_before: Count  # blocks of the context before the first of these
    hashes: Hashes  # of the full blocks that follow, in order


class PrefixFound(Message, frozen=True):
    """Answer to FindPrefix: the blocks, lent until PrefixReleased."""

    request_id: RequestId
    lease_id: LeaseId = LeaseId(0)
    copy: BlockCopy | None = None  # None: none of them is kept
    packed_tokens: tuple[PackedTokens, ...] = ()  # of each block


class PrefixReleased(Message, frozen=True):
    """Worker to pool: read, or not wanted."""

    lease_id: LeaseId
    is_damaged: bool = False  # the bytes did not verify

"""Names full blocks of a context by keyed hashes, each of a block's tokens and of everything before them.

Two contexts have a block in common exactly if its hash is equal; as hashes may collide, a taker of a block compares its
tokens as well (cached_blocks.py). The chain begins at a root: a keyed hash of the tenant that the values belong to
and of everything but tokens that they depend on. Each hash begins with the one before it, so that without the key,
which is random in every cluster, none can be foreseen, and no collision be made on purpose.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from alignedserve.core.request import PREFIX_ROOT_BYTES

BlockHash = bytes  # HASH_BYTES of them

HASH_BYTES = PREFIX_ROOT_BYTES
_MAX_KEY_BYTES = 64  # of BLAKE2b
_NARROW_BYTES = 4
_WIDE_BYTES = 16  # what a message can carry fits


def prefix_root(key: bytes, *, tenant: str, salt: str, form: bytes) -> BlockHash:
    """Return the root of the hashes of one tenant's contexts. `form`: digest of model, adapter and cache form.

    Parts are hashed with their lengths, so that no two ways of cutting them give the same root.
    """
    digest = hashlib.blake2b(key=key[:_MAX_KEY_BYTES], digest_size=HASH_BYTES, person=b"prefix root")
    for part in (tenant.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass"), form):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class NamedBlock(NamedTuple):
    """A full block of a context: its hash, and the tokens by which a hit is verified."""

    block_hash: BlockHash
    packed_tokens: bytes


class BlockHasher:
    """Makes the hashes of the blocks of contexts, for one block size. Their secret is in the root."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def named(self, parent: BlockHash, token_ids: Sequence[int]) -> Iterator[NamedBlock]:
        """Yield the full blocks of a context, each hashed when the caller takes it. `parent`: the root or the block
        before."""
        for packed in packed_blocks(token_ids, self.block_size):
            parent = block_hash(parent, packed)
            yield NamedBlock(parent, packed)


def block_hash(parent: BlockHash, packed_tokens: bytes) -> BlockHash:
    """Return the hash of a block with these tokens. `parent`: the hash of the block before it, or the root."""
    return hashlib.blake2b(parent + packed_tokens, digest_size=HASH_BYTES).digest()


def packed_blocks(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    if len(token_ids) < block_size:
        return
    packed = packed_tokens(token_ids)
    num_bytes = _NARROW_BYTES * block_size
    if len(packed) == _NARROW_BYTES * len(token_ids):
        for start in range(0, len(packed) - num_bytes + 1, num_bytes):
            yield packed[start : start + num_bytes]
        return
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        yield packed_tokens(token_ids[start : start + block_size])


def packed_tokens(token_ids: Sequence[int]) -> bytes:
    """Return tokens as little-endian integers of 32 bits; wider if one does not fit, as the keys of pictures are."""
    try:
        packed = array("i", token_ids)
    except OverflowError:
        return b"".join(token_id.to_bytes(_WIDE_BYTES, "little", signed=True) for token_id in token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()

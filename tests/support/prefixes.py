"""Contexts of the prefix cache to offer and to ask for: blocks of four tokens, whose names are made up."""

import hashlib
from dataclasses import dataclass

from alignedserve.messages.prefixes import HASH_BYTES, PrefixBlock, PrefixPart
from alignedserve.prefix_cache.block_hashes import packed_tokens

BLOCK_SIZE = 4
ROOT = b"root".ljust(HASH_BYTES, b".")


@dataclass(frozen=True)
class Context:
    """A context's full blocks, in order."""

    blocks: tuple[PrefixBlock, ...]


def chain(*numbers: int, first_token: int = 0) -> Context:
    """Build a context from a number for each block: contexts share as many blocks as they begin with equal numbers."""
    made, path = [], ""
    for number in numbers:
        path += f"/{number}"
        name = hashlib.blake2b(path.encode(), digest_size=HASH_BYTES).digest()
        made.append(PrefixBlock(name, packed_tokens([first_token + 4 * number + at for at in range(BLOCK_SIZE)])))
    return Context(tuple(made))


def part_of(context: Context, num_before: int = 0, stop: int | None = None) -> PrefixPart:
    """Return the blocks from `num_before` to `stop` as they are offered."""
    parent = context.blocks[num_before - 1].block_hash if num_before else ROOT
    return PrefixPart(num_before, parent, context.blocks[num_before:stop])

"""Names of blocks: equal for equal beginnings under the same root, and foreseen only with the key."""

from collections.abc import Sequence

import pytest

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import Request, SamplingParams
from alignedserve.prefix_cache.block_hashes import (
    HASH_BYTES,
    BlockHash,
    BlockHasher,
    block_hash,
    packed_tokens,
    prefix_root,
)

KEY = b"k" * 32
ROOT = prefix_root(KEY, tenant="a", salt="", form=b"model")


def hashes_of(block_size: int, token_ids: Sequence[int], parent: BlockHash = ROOT) -> list[BlockHash]:
    return [block.block_hash for block in BlockHasher(block_size).named(parent, token_ids)]


def test_a_root_depends_on_every_part_and_on_the_key() -> None:
    roots = {
        ROOT,
        prefix_root(KEY, tenant="b", salt="", form=b"model"),
        prefix_root(KEY, tenant="a", salt="s", form=b"model"),
        prefix_root(KEY, tenant="a", salt="", form=b"other"),
        prefix_root(b"other", tenant="a", salt="", form=b"model"),
        prefix_root(KEY, tenant="", salt="a", form=b"model"),
        prefix_root(KEY, tenant="as", salt="", form=b"model"),
    }
    assert len(roots) == 7
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_a_salt_of_a_megabyte_and_of_odd_characters_is_a_root_like_any_other() -> None:
    assert len(prefix_root(KEY, tenant="\ud800", salt="x" * (1 << 20), form=b"")) == HASH_BYTES


def test_contexts_with_the_same_beginning_share_its_hashes() -> None:
    one, other = hashes_of(4, range(14)), hashes_of(4, [*range(9), 0, *range(10, 14)])
    assert len(one) == len(other) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert hashes_of(4, range(4, 12), one[0]) == one[1:]
    assert block_hash(one[0], packed_tokens(range(4, 8))) == one[1]
    assert [block.packed_tokens for block in BlockHasher(4).named(ROOT, range(14))][1] == packed_tokens(range(4, 8))


def test_the_same_block_after_another_has_another_hash() -> None:
    assert len(set(hashes_of(2, [7, 7, 7, 7, 7, 7]))) == 3


def test_less_than_a_block_has_no_hash() -> None:
    assert hashes_of(4, ()) == hashes_of(4, (1, 2, 3)) == []


def test_tokens_that_no_model_has_are_hashed_too() -> None:
    wide = hashes_of(2, (1 << 63, -1, 0, 0))
    assert len(wide) == 2
    assert not set(wide) & set(hashes_of(2, (0, -1, 0, 0)))


def test_a_request_has_a_root_or_none() -> None:
    Request("r", (1,), SamplingParams(), "gateway", 0.0, prefix_root=ROOT)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="prefix_root"):
        Request("r", (1,), SamplingParams(), "gateway", 0.0, prefix_root=b"short")  # type: ignore[arg-type]

"""Prefix blocks in a pool of eight blocks of four tokens, offered by two workers of its node."""

from typing import Any

import pytest

from alignedserve.core.ids import BlockId, LeaseId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.events import Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixReleased,
    ReservedPart,
    StorePrefixBlocks,
    names_told,
)
from kvpool.logic import PoolCommand
from kvpool.state import SetBlockGeneration
from tests.harnesses.pool import PoolHarness, freed, leased
from tests.support.prefixes import chain, part_of
from tests.support.samples import DECODE, PREFILL, R1, blocks

ONE, OTHER = PREFILL, DECODE  # two workers
LONG = chain(*range(1, 7))  # six blocks, of the same context
FORK = chain(1, 2, 9, 10)  # begins with the first two of them


class Pool(PoolHarness):
    def offer(self, context: Any, num_before: int = 0, peer: str = ONE, stop: int | None = None) -> list[PoolCommand]:
        return self.hear(peer, StorePrefixBlocks((part_of(context, num_before, stop),)))

    def reserved(self, *arguments: Any, **changes: Any) -> ReservedPart:
        (answer,) = [one.message for one in self.offer(*arguments, **changes) if isinstance(one, Send)]
        assert isinstance(answer, PrefixBlocksReserved)
        return answer.parts[0]

    def write(self, part: ReservedPart, num_blocks: int | None = None, peer: str = ONE) -> list[PoolCommand]:
        sums = tuple(100 + block_id for block_id in part.block_ids[:num_blocks])
        return self.hear(peer, PrefixBlocksWritten(part.lease_id, sums))

    def store(self, context: Any, **changes: Any) -> ReservedPart:
        part = self.reserved(context, **changes)
        self.write(part)
        return part

    def find(self, context: Any, num_before: int = 0, peer: str = OTHER) -> PrefixFound:
        hashes = b"".join(block.block_hash for block in context.blocks[num_before:])
        (command,) = self.hear(peer, FindPrefix(R1, num_before, hashes))
        assert isinstance(command, Send)
        assert isinstance(command.message, PrefixFound)
        return command.message

    @property
    def num_free(self) -> int:
        load = self.load
        return 8 - load.num_blocks_used if load is not None else 8


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_new_block_gets_a_place_and_is_lent_when_it_is_written(pool: Pool) -> None:
    commands = pool.offer(LONG, stop=2)
    part = ReservedPart(0, LeaseId(1), blocks(0, 1))
    assert commands == [SetBlockGeneration(blocks(0, 1), 1), Send(ONE, PrefixBlocksReserved((part,)))]
    assert pool.find(LONG).copy is None
    assert pool.write(part) == [SetBlockGeneration(blocks(0, 1), 2)]
    tokens = tuple(block.packed_tokens for block in LONG.blocks[:2])
    copy = BlockCopy(2, 8, (BlockRun(0, 1, 100), BlockRun(1, 1, 101)))
    assert pool.find(LONG) == PrefixFound(R1, LeaseId(3), copy, tokens)


def test_of_what_follows_only_the_rest_is_lent(pool: Pool) -> None:
    pool.store(LONG)
    assert pool.find(LONG, 4).copy == BlockCopy(2, 8, (BlockRun(4, 1, 104), BlockRun(5, 1, 105)), 4)


def test_a_context_that_forks_shares_the_beginning(pool: Pool) -> None:
    pool.store(LONG)
    part = pool.reserved(FORK)
    assert (part.num_known, part.block_ids) == (2, blocks(6, 7))
    pool.write(part)
    assert [run.first_block for run in pool.find(FORK).copy.runs] == [0, 1, 6, 7]  # type: ignore[union-attr]


def test_what_is_there_needs_nothing(pool: Pool) -> None:
    pool.store(LONG)
    assert pool.reserved(LONG, 2) == ReservedPart(4)


def test_what_another_writes_needs_nothing_now(pool: Pool) -> None:
    part = pool.reserved(LONG, stop=3)
    assert pool.reserved(LONG, peer=OTHER) == ReservedPart(3)
    assert pool.hear(OTHER, PrefixBlocksWritten(part.lease_id, (1, 2, 3))) == []  # nor may it say that it is done
    assert pool.find(LONG).copy is None


def test_a_block_whose_context_is_not_here_is_an_orphan(pool: Pool) -> None:
    assert pool.reserved(LONG, 2) == ReservedPart(0, is_orphan=True)
    pool.store(LONG)
    moved = part_of(LONG, 3)
    answer = pool.hear(ONE, StorePrefixBlocks((type(moved)(2, moved.parent, moved.blocks),)))
    assert answer == [Send(ONE, PrefixBlocksReserved((ReservedPart(0, is_orphan=True),)))]


def test_other_tokens_of_the_same_name_are_not_kept(pool: Pool) -> None:
    pool.store(LONG)
    forged = chain(*range(1, 7), first_token=500)
    assert pool.reserved(forged) == ReservedPart(6)


def test_unwritten_blocks_are_free_again(pool: Pool) -> None:
    part = pool.reserved(LONG)
    assert pool.write(part, 2) == [SetBlockGeneration(blocks(0, 1), 2), freed(2, 3, 4, 5)]
    assert pool.find(LONG).copy == BlockCopy(2, 8, (BlockRun(0, 1, 100), BlockRun(1, 1, 101)))
    assert pool.write(part) == []  # not twice
    assert pool.num_free == 6


def test_a_worker_lost_amid_writing_leaves_nothing(pool: Pool) -> None:
    pool.reserved(LONG)
    assert pool.lose(ONE) == [freed(0, 1, 2, 3, 4, 5)]
    assert pool.num_free == 8


def test_what_is_lent_stays(pool: Pool) -> None:
    pool.store(LONG)
    found = pool.find(LONG)
    assert pool.reserve("r1", 3) == []  # it waits
    assert pool.reserved(chain(50, 51)) == ReservedPart(0)  # nothing is ahead of it
    assert pool.hear(OTHER, PrefixReleased(found.lease_id)) == [freed(5), *leased("r1", 4, 5, 6, 7)]


def test_a_reader_that_is_lost_gives_back(pool: Pool) -> None:
    pool.store(LONG)
    pool.find(LONG)
    pool.lose(OTHER)
    assert len(pool.reserve("r1", 8)) == 3


def test_only_its_reader_gives_back(pool: Pool) -> None:
    pool.store(LONG)
    found = pool.find(LONG)
    pool.hear(ONE, PrefixReleased(found.lease_id))
    assert pool.reserve("r1", 3) == []


def test_new_blocks_replace_what_is_worth_less(pool: Pool) -> None:
    pool.store(LONG)
    for _ in range(2):
        pool.hear(OTHER, PrefixReleased(pool.find(LONG).lease_id))
    pool.store(chain(60, 61))
    part = pool.reserved(chain(70, 71))
    assert part.block_ids == (BlockId(6), BlockId(7))  # of the context that was used once
    assert len(pool.find(LONG).packed_tokens) == 6


def test_damaged_blocks_are_lent_no_more(pool: Pool) -> None:
    pool.store(LONG)
    found = pool.find(LONG, 3)
    pool.hear(OTHER, PrefixReleased(found.lease_id, is_damaged=True))
    assert len(pool.find(LONG).packed_tokens) == 3
    pool.reserve("r1", 8 - 3)
    pool.hear(PREFILL, PrefixReleased(LeaseId(99)))
    assert pool.reserved(LONG).num_known == 3


def test_damaged_blocks_leave_with_their_last_reader_and_are_written_again(pool: Pool) -> None:
    pool.store(LONG)
    first, second = pool.find(LONG), pool.find(LONG)
    pool.hear(OTHER, PrefixReleased(first.lease_id, is_damaged=True))
    assert pool.reserved(LONG).block_ids == ()  # still read
    pool.hear(OTHER, PrefixReleased(second.lease_id))
    assert len(pool.store(LONG).block_ids) == 6
    assert len(pool.find(LONG).packed_tokens) == 6


def test_a_context_longer_than_the_pool_is_kept_as_far_as_it_fits(pool: Pool) -> None:
    assert len(pool.store(chain(*range(20))).block_ids) == 8
    assert len(pool.find(chain(*range(20))).packed_tokens) == 8


def test_a_part_that_names_a_block_twice_is_kept_up_to_there(pool: Pool) -> None:
    part = part_of(LONG)
    twice = type(part)(0, part.parent, (*part.blocks[:2], *part.blocks[:2]))
    (command,) = [one for one in pool.hear(ONE, StorePrefixBlocks((twice,))) if isinstance(one, Send)]
    assert command.message == PrefixBlocksReserved((ReservedPart(0, LeaseId(1), blocks(0, 1)),))


def test_routers_are_told_what_is_kept() -> None:
    pool = Pool()
    kept = chain(*range(8))
    pool.store(kept)
    pool.do(Ticked())
    pool.link("router-1", Role.ROUTER)
    told = names_told(block.block_hash for block in kept.blocks)
    assert [(change.stored, change.is_complete) for change in pool.told] == [(told, False), (told, True)]
    pool.reserve("r1", 8)
    pool.do(Ticked())
    assert set(pool.told[-1].removed) == set(told)

"""Blocks of the buffers in prefill workers' memory, as the decode worker gives them out."""

from decode_worker.batching.buffer_space import BufferSpace
from decode_worker.state import BufferSlot
from tests.support.marks import each
from tests.support.samples import blocks

ONE, OTHER = "prefill-0", "prefill-1"


def space(**sizes: int) -> BufferSpace:
    made = BufferSpace()
    for peer, num_blocks in (sizes or {"prefill_0": 8}).items():
        made.opened(peer.replace("_", "-"), num_blocks)
    return made


def test_without_a_buffer_there_is_no_room() -> None:
    made = BufferSpace()
    assert made.for_prefetch(1) is None
    assert made.for_eviction(1) is None
    assert not made.is_short


def test_a_slot_says_where_it_is() -> None:
    assert space().for_prefetch(2) == BufferSlot(ONE, 1, blocks(0, 1), 1)


def test_every_slot_has_a_generation_of_its_own() -> None:
    made = space()
    first = made.for_prefetch(1)
    assert first is not None
    made.free(first)
    again = made.for_prefetch(1)
    assert again is not None
    assert (again.block_ids, again.generation) == (first.block_ids, 2)


@each(("num_blocks", "is_there_room"), [(6, True), (7, False)])
def test_prefetches_leave_a_quarter_to_evictions(num_blocks: int, is_there_room: bool) -> None:
    assert (space().for_prefetch(num_blocks) is not None) == is_there_room


def test_evictions_may_use_all_of_it() -> None:
    made = space()
    made.for_prefetch(6)
    assert made.for_eviction(2) is not None
    assert made.for_eviction(1) is None


def test_it_is_short_when_no_buffer_has_its_quarter_left() -> None:
    made = space(prefill_0=8, prefill_1=8)
    made.at(ONE, 7)
    assert not made.is_short
    made.at(OTHER, 7)
    assert made.is_short


def test_the_emptiest_buffer_is_used_first() -> None:
    made = space(prefill_0=8, prefill_1=8)
    made.at(OTHER, 1)
    slot = made.for_prefetch(1)
    assert slot is not None
    assert slot.peer == ONE


def test_room_at_one_prefill_worker_is_looked_for_only_there() -> None:
    made = space(prefill_0=8, prefill_1=2)
    assert made.at(OTHER, 3) is None


def test_what_was_freed_can_be_had_again() -> None:
    made = space()
    slot = made.for_eviction(8)
    assert slot is not None
    made.free(slot)
    assert made.num_used == 0


def test_a_buffer_that_was_lost_holds_nothing() -> None:
    made = space()
    slot = made.for_eviction(8)
    assert slot is not None
    made.lost(ONE)
    assert not made.holds(slot)
    assert made.num_used == 0


def test_what_lay_in_an_earlier_life_of_a_buffer_frees_nothing_in_this_one() -> None:
    made = space()
    slot = made.for_eviction(3)
    assert slot is not None
    made.lost(ONE)
    made.opened(ONE, 8)
    made.for_eviction(5)
    made.free(slot)
    assert made.num_used == 5


def test_a_buffer_that_is_offered_anew_is_empty() -> None:
    made = space()
    made.for_eviction(8)
    made.opened(ONE, 4)
    assert made.for_eviction(4) == BufferSlot(ONE, 2, blocks(0, 1, 2, 3), 2)


def test_a_buffer_without_blocks_has_no_room() -> None:
    made = space(prefill_0=0)
    assert made.for_prefetch(1) is None
    assert made.is_short


def test_a_buffer_beside_another_pool_is_for_what_comes_straight_into_it() -> None:
    made = space(prefill_0=4)
    made.opened(OTHER, 40, is_far=True)
    assert made.for_prefetch(4) is None
    evicted, handed = made.for_eviction(4), made.at(OTHER, 20)
    assert evicted is not None
    assert evicted.peer == ONE
    assert handed is not None
    assert (made.is_far(evicted), made.is_far(handed)) == (False, True)
    assert made.for_eviction(1) is None
    assert made.is_short  # the free blocks of the far one do not count
    made.free(handed)
    made.lost(OTHER)
    made.opened(OTHER, 40)
    assert made.for_eviction(1) is not None

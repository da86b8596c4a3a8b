"""Blocks of the buffers in prefill workers' memory, as the decode worker gives them out."""

from alignedserve.worker_core.handoff import BufferSlot, BufferSpace
from tests.support.marks import each
from tests.support.samples import blocks

ONE, OTHER = "prefill-0", "prefill-1"


def space(**sizes: int) -> BufferSpace:
    made = BufferSpace()
    for peer, num_blocks in (sizes or {"prefill_0": 8}).items():
        made.opened(peer.replace("_", "-"), num_blocks)
    return made


def test_a_slot_says_where_it_is() -> None:
    assert space().for_prefetch(2) == BufferSlot(ONE, 1, blocks(0, 1), 1)


@each(("num_blocks", "is_there_room"), [(6, True), (7, False)])
def test_prefetches_leave_a_quarter_to_evictions(num_blocks: int, is_there_room: bool) -> None:
    assert (space().for_prefetch(num_blocks) is not None) == is_there_room


def test_it_is_short_when_no_buffer_has_its_quarter_left() -> None:
    made = space(prefill_0=8, prefill_1=8)
    made.at(ONE, 7)
    assert not made.is_short
    made.at(OTHER, 7)
    assert made.is_short


def test_what_lay_in_an_earlier_life_of_a_buffer_frees_nothing_in_this_one() -> None:
    made = space()
    slot = made.for_eviction(3)
    assert slot is not None
    made.lost(ONE)
    made.opened(ONE, 8)
    made.for_eviction(5)
    made.free(slot)
    assert made.num_used == 5


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


def test_evictions_of_documents_leave_an_eighth_to_chat() -> None:
    made = space(prefill_0=16)
    assert made.for_eviction(15, leaves_room=True) is None
    assert made.for_eviction(14, leaves_room=True) is not None
    assert made.for_eviction(1, leaves_room=True) is None
    assert made.at(ONE, 2) is not None

"""Random histories of the block allocator against a model made of sets."""

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId

# Positive: allocate that many. Negative: free the holding at that place, in part or whole.
STEPS = st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 30)), max_size=60)


@given(num_blocks=st.integers(0, 30), steps=STEPS)
def test_blocks_are_conserved_and_never_handed_out_twice(num_blocks: int, steps: list[tuple[int, bool, int]]) -> None:
    allocator = BlockAllocator(num_blocks)
    free = set(range(num_blocks))
    holdings: list[tuple[BlockId, ...]] = []
    for count, is_allocation, place in steps:
        if is_allocation or not holdings:
            taken = allocator.allocate(count)
            assert (taken is None) == (count > len(free))
            if taken is not None:
                assert len(taken) == len(set(taken)) == count
                assert set(taken) <= free
                free -= set(taken)
                holdings.append(taken)
        else:
            held = holdings.pop(place % len(holdings))
            allocator.free(held[:count])
            free |= set(held[:count])
            holdings.append(held[count:])
        assert allocator.num_free == len(free)
        assert allocator.num_used == sum(map(len, holdings)) == num_blocks - len(free)


@given(steps=STEPS)
def test_the_same_history_gives_the_same_blocks(steps: list[tuple[int, bool, int]]) -> None:
    one, other = BlockAllocator(20), BlockAllocator(20)
    for count, is_freed, _ in steps:
        taken = one.allocate(count)
        assert taken == other.allocate(count)
        if taken is not None and is_freed:
            one.free(taken)
            other.free(taken)

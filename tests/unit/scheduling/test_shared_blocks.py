"""Blocks of two requests: who shares, what is overwritten, who leaves, and what the worker's numbers say of it."""

from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policy import (
    DeviceMemory,
    EvictionMode,
    IterationPlan,
    PlannedEviction,
    PlannedShare,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.scheduler_state import EvictionResult, SchedulerState
from alignedserve.scheduling.shared_blocks import AllocationResult, BlockPair, num_overwritten, slots_in_last
from alignedserve.scheduling.sharing_packer import Overwritten, SharingPacker
from tests.harnesses.scheduling import assert_sound, request_of, view_of
from tests.support.marks import each

RT, BE = RequestId("rt"), RequestId("be")


def test_slots_of_the_last_block_are_counted_from_its_first_token() -> None:
    assert [slots_in_last(count, 4) for count in (1, 3, 4, 5, 8)] == [1, 3, 4, 1, 4]


@each(("left", "right", "overlap"), [(1, 3, 0), (2, 2, 0), (2, 3, 1), (4, 1, 1), (4, 4, 4)])
def test_slots_are_overwritten_where_both_ends_meet(left: int, right: int, overlap: int) -> None:
    assert num_overwritten(left, right, 4) == overlap


# --- a worker of four slots a block, where both have computed their prompts


def sharing_state(rt_len: int, be_len: int, num_blocks: int = 4) -> SchedulerState:
    """A best-effort request first; then a real-time one that shares its last block."""
    state = SchedulerState(DeviceMemory(num_blocks, num_blocks, 4, 20, has_shared_blocks=True))
    state.add(request_of("be", {"prompt_len": be_len, "be": True}), 0.0)
    do(state, IterationPlan((ScheduledRequest(0, be_len),)))
    state.add(request_of("rt", {"prompt_len": rt_len}), 0.0)
    do(state, IterationPlan((ScheduledRequest(1, rt_len),), shares=(PlannedShare(1, 0),)))
    return state


def do(state: SchedulerState, plan: IterationPlan) -> list[AllocationResult]:
    state.begin(plan)
    for eviction in plan.evictions:
        state.evict(eviction, 0.0)
    for share in plan.shares:
        state.share_last_block(share)
    entered = [state.enter(part) for part in plan.scheduled]
    state.completed(now=0.0, duration_s=0.1)
    return entered


def test_a_shared_block_is_counted_once() -> None:
    state = sharing_state(rt_len=2, be_len=6)
    assert state.table.num_blocks.tolist() == [2, 1]
    assert state.num_free == 4 - 2
    assert list(state.shared.pairs()) == [BlockPair(RT, BE)]


def test_both_grow_until_their_slots_meet() -> None:
    state = sharing_state(rt_len=1, be_len=6)  # a slot left between two and one
    assert do(state, IterationPlan((ScheduledRequest(0, 1),))) == [AllocationResult(0, 0)]
    assert state.shared.used_slots(0) == 3


def test_a_best_effort_request_without_room_leaves_the_block_with_what_it_has_there() -> None:
    state = sharing_state(rt_len=2, be_len=6)
    (entered,) = do(state, IterationPlan((ScheduledRequest(0, 1),)))
    assert entered == AllocationResult(num_blocks=1, num_swapped=0, num_moved=2)
    assert (state.table.num_blocks.tolist(), state.num_free, len(state.shared)) == ([2, 1], 1, 0)
    assert (state.work.swap_out_tokens, state.work.swap_in_tokens) == (2, 2)


def test_slots_that_are_overwritten_leave_no_block() -> None:
    state = sharing_state(rt_len=2, be_len=6)
    assert state.evict(PlannedEviction(0, EvictionMode.SWAP, 1), 0.0) == EvictionResult(0, 1)
    assert (state.num_free, state.num_free_host, len(state.shared)) == (2, 19, 1)


@each("how", EvictionMode)
def test_a_block_whose_last_slots_leave_is_the_others_own(how: EvictionMode) -> None:
    state = sharing_state(rt_len=2, be_len=6)
    left = state.evict(PlannedEviction(0, how, 2 if how is EvictionMode.SWAP else None), 0.0)
    assert left.is_last_shared
    assert state.num_free == (2 if how is EvictionMode.SWAP else 3)
    assert not state.shared


def test_a_request_that_ends_leaves_the_shared_block_to_the_other() -> None:
    state = sharing_state(rt_len=2, be_len=6)
    assert state.remove(BE) == 1
    assert (state.num_free, len(state.shared)) == (3, 0)
    assert state.remove(RT) == 1
    assert state.num_free == 4


# --- packing


def sharing_view(rows: dict[str, dict[str, Any]], pairs: list[tuple[str, str]], num_blocks: int) -> WorkerView:
    """`pairs`: whose last blocks are one."""
    view = view_of(rows, num_blocks=num_blocks + len(pairs), block_size=4, num_free_host=20, has_shared_blocks=True)
    assert view.shared_blocks is not None
    for one, other in pairs:
        view.shared_blocks.share(RequestId(one), RequestId(other))
    memory = DeviceMemory(num_blocks, view.memory.num_free, 4, 20, has_shared_blocks=True)
    return WorkerView(
        *(view.table, memory, view.limits, view.history, view.costs, view.now), shared_blocks=view.shared_blocks
    )


def test_what_a_real_time_request_will_overwrite_has_to_leave_first() -> None:
    rows = {"be": {"prompt_len": 6, "num_generated": 1, "be": True}, "rt": {"prompt_len": 2, "num_generated": 1}}
    packer = SharingPacker(sharing_view(rows, [("rt", "be")], 4))
    assert packer.overwritten(1, 1) == Overwritten(0, 1)
    packer.evict(0, EvictionMode.SWAP, 1)
    assert packer.overwritten(1, 1) is None
    assert packer.blocks_needed(1, 1) == 0
    assert packer.add(1, 1)
    assert packer.num_free == 2


def test_a_best_effort_request_needs_a_block_where_it_would_meet_the_other() -> None:
    rows = {"be": {"prompt_len": 6, "num_generated": 1, "be": True}, "rt": {"prompt_len": 1, "num_generated": 1}}
    view = sharing_view(rows, [("rt", "be")], 4)
    packer = SharingPacker(view)
    assert packer.blocks_needed(0, 1) == 0  # one slot each more than they have
    assert packer.add(1, 1)
    assert packer.blocks_needed(0, 1) == 1  # the other takes the slot between them
    assert packer.add(0, 1)
    assert packer.num_free == 1
    assert (packer.work.swap_out_tokens, packer.work.swap_in_tokens) == (2, 2)
    assert_sound(view, packer.plan())


def test_who_is_withdrawn_shares_again_as_before() -> None:
    rows = {"be": {"prompt_len": 6, "num_generated": 1, "be": True}, "rt": {"prompt_len": 2, "num_generated": 1}}
    packer = SharingPacker(sharing_view(rows, [("rt", "be")], 4))
    assert packer.add(0, 1)
    assert packer.partner(1) is None
    packer.withdraw(0)
    assert (packer.partner(0), packer.partner(1), packer.num_free) == (1, 0, 2)
    assert (packer.work.swap_out_tokens, packer.work.num_decodes) == (0, 0)


def test_a_best_effort_request_joins_a_real_time_one_only_where_nothing_is_overwritten() -> None:
    rows = {
        "full": {"prompt_len": 3, "num_generated": 1},
        "empty": {"prompt_len": 5, "num_generated": 1},
        "be": {"prompt_len": 3, "be": True},
    }
    view = sharing_view(rows, [], 3)
    packer = SharingPacker(view)
    assert packer.find_partner(2, 3) == 1
    assert packer.join(2, 3, 1)
    assert packer.is_joined(1)
    assert (packer.num_free, packer.plan().shares) == (0, (PlannedShare(2, 1),))
    assert_sound(view, packer.plan())
    assert SharingPacker(sharing_view(rows | {"be": {"prompt_len": 4, "be": True}}, [], 3)).find_partner(2, 4) is None

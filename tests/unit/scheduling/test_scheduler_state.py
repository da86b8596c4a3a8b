"""The state of a worker's scheduler: which requests of an iteration take blocks or come back from the host."""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.scheduling.policy import (
    DeviceMemory,
    EvictionMode,
    IterationPlan,
    PlannedEviction,
    ScheduledRequest,
)
from alignedserve.scheduling.scheduler_state import SchedulerState


def _decoding(state: SchedulerState, name: str, prompt_len: int) -> int:
    """Add a request, compute its prompt, and return its row."""
    sampling = SamplingParams(max_tokens=100)
    state.add(Request(RequestId(name), tuple(range(3, 3 + prompt_len)), sampling, "gateway", 0.0), 0.0)
    row = state.table.row(RequestId(name))
    state.begin(IterationPlan((ScheduledRequest(row, prompt_len),)))
    assert state.grows() == [True]
    state.enter(ScheduledRequest(row, prompt_len))
    state.completed(now=1.0, duration_s=0.1)
    return row


def test_only_requests_that_take_blocks_or_come_back_from_the_host_grow() -> None:
    state = SchedulerState(DeviceMemory(num_blocks=8, num_free=8, block_size=4, num_free_host=32))
    within, full, swapped = (_decoding(state, name, length) for name, length in (("a", 6), ("b", 8), ("c", 6)))
    state.evict(PlannedEviction(swapped, EvictionMode.SWAP), 1.0)
    parts = tuple(ScheduledRequest(row, 1) for row in (within, full, swapped))
    state.begin(IterationPlan(parts))
    assert state.grows() == [False, True, True]
    entered = [state.enter(part) for part in parts]
    assert [(one.num_blocks, one.num_swapped) for one in entered] == [(0, 0), (1, 0), (2, 6)]

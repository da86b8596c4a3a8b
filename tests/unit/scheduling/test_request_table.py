"""The columns of a worker's requests and the state of its scheduler."""

import numpy as np
import pytest

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
from alignedserve.scheduling.table import RequestTable
from tests.harnesses.scheduling import request_of, table_of
from tests.support.marks import each


def test_a_request_with_tokens_from_elsewhere_waits_since_it_came() -> None:
    table = RequestTable()
    table.add(request_of("a", {"arrival_s": 2.0, "prompt_len": 10}), 5.0, num_generated=4, begun_s=2.5)
    assert (table.waits_since_s[0], table.first_token_s[0], table.last_token_s[0]) == (5.0, 2.5, 5.0)
    assert (table.context_len[0], table.num_remaining[0]) == (14, 14)


@each(("predicted", "kept"), [(None, 30.0), (0.2, 1.0), (12.5, 12.5), (99.0, 30.0)])
def test_a_prediction_lies_between_one_token_and_the_limit(predicted: float | None, kept: float) -> None:
    table = RequestTable()
    table.add(request_of("a", {"max_tokens": 30}), 0.0, predicted_len=predicted)
    assert table.predicted_len[0] == kept


def test_the_last_row_moves_into_the_place_of_one_that_leaves() -> None:
    table = table_of({name: {"prompt_len": length} for name, length in (("a", 1), ("b", 2), ("c", 3))})
    table.remove(RequestId("a"))
    assert [str(request_id) for request_id in table.request_ids] == ["c", "b"]
    assert (table.row(RequestId("c")), table.row(RequestId("b"))) == (0, 1)
    assert (table.prompt_len.tolist(), table.order.tolist()) == ([3, 2], [2, 1])
    assert RequestId("a") not in table


def test_a_row_used_again_holds_nothing_of_who_had_it() -> None:
    table = table_of({"a": {"num_generated": 5, "num_swapped": 3, "is_hidden": True, "service_s": 4.0}})
    table.remove(RequestId("a"))
    table.add(request_of("b", {}), 1.0)
    assert (table.num_generated[0], table.num_cached[0], table.num_swapped[0], table.num_blocks[0]) == (0, 0, 0, 0)
    assert (table.is_hidden[0], table.service_s[0], table.order[0]) == (False, 0.0, 1)
    assert np.isnan(table.first_token_s[0])


def test_unknown_and_repeated_requests() -> None:
    table = table_of({"a": {}})
    with pytest.raises(KeyError):
        table.row(RequestId("b"))
    with pytest.raises(KeyError):
        table.remove(RequestId("b"))
    with pytest.raises(AssertionError, match="added twice"):
        table.add(request_of("a", {}), 0.0)


def test_who_decodes() -> None:
    rows = {
        "prompt of one token": {"prompt_len": 1},
        "half prefilled": {"prompt_len": 10, "num_cached": 5},
        "decodes": {"prompt_len": 10, "num_generated": 2},
        "decodes, on the host": {"prompt_len": 10, "num_generated": 2, "num_swapped": 11},
        "dropped": {"prompt_len": 10, "num_generated": 2, "num_cached": 0},
    }
    table = table_of(rows)
    assert table.num_remaining.tolist() == [1, 5, 1, 1, 12]
    assert table.is_decoding.tolist() == [False, False, True, True, False]


def test_when_the_next_token_is_due() -> None:
    rows = {
        "first": {"arrival_s": 1.0, "ttft_s": 0.5, "tpot_s": 0.1},
        "fourth": {"num_generated": 3, "first_token_s": 2.0, "tpot_s": 0.1},
        "first, no objective": {"arrival_s": 1.0},
        "second, no objective": {"num_generated": 1, "ttft_s": 0.5},
    }
    assert table_of(rows).next_token_due_s.tolist() == [1.5, pytest.approx(2.3), np.inf, np.inf]


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

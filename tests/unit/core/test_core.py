"""Records that all components share: blocks, the lifecycle, chunks, bounds of sampling."""

import math
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.block_layout import BlockLayout, LayerHeads
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.lifecycle import TRANSITIONS, Stage, advance, is_terminal, plan_chunks
from alignedserve.core.request import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, SamplingParams
from tests.support.marks import each
from tests.support.samples import R1, R2, R3, blocks, request

# --- blocks


@each(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 16) == expected


def test_blocks_go_out_from_the_lowest_and_the_last_freed_first() -> None:
    allocator = BlockAllocator(5)
    assert allocator.allocate(3) == blocks(0, 1, 2)
    allocator.free(blocks(1))
    allocator.free(blocks(0, 2))
    assert allocator.allocate(4) == blocks(0, 2, 1, 3)


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(3)
    assert allocator.allocate(4) is None
    assert (allocator.num_free, allocator.num_used) == (3, 0)
    assert allocator.allocate(3) == blocks(0, 1, 2)
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == ()
    assert (allocator.num_free, allocator.num_used) == (0, 3)


def test_freeing_a_block_twice_is_a_broken_invariant() -> None:
    allocator = BlockAllocator(3)
    taken = allocator.allocate(2)
    assert taken is not None
    allocator.free(taken)
    with pytest.raises(AssertionError, match="block 1 freed twice"):
        allocator.free(blocks(1))


def test_freeing_a_block_twice_in_one_call_is_a_broken_invariant() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        allocator.free(blocks(0, 0))


def test_negative_counts_are_broken_invariants() -> None:
    with pytest.raises(AssertionError):
        BlockAllocator(-1)
    with pytest.raises(AssertionError):
        BlockAllocator(1).allocate(-1)


def test_block_layout_counts_bytes() -> None:
    layout = BlockLayout(block_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    assert layout.block_bytes == 2 * 2 * 8 * 2 * 8 * 2
    assert layout.token_bytes == 2 * 2 * 2 * 8 * 2
    unlike = replace(layout, num_layers=5, unlike=(LayerHeads(3, 1, 32),))
    assert unlike.token_bytes == layout.token_bytes + 3 * 2 * 32 * 2
    assert unlike.int8_block_bytes == unlike.block_elements + 4 * (4 * 16 + 6 * 32)


def test_digests_of_any_two_layouts_differ() -> None:
    sizes: dict[str, Any] = {"block_size": 8, "num_layers": 2, "num_kv_heads": 4, "head_dim": 16, "dtype": "float32"}
    changes: list[dict[str, Any]] = [
        {},
        {"block_size": 16},
        {"num_layers": 4},
        {"num_kv_heads": 8, "head_dim": 8},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"unlike": (LayerHeads(1, 4, 32),)},
        {"unlike": (LayerHeads(1, 8, 16),)},
    ]
    assert len({BlockLayout(**{**sizes, **change}).digest() for change in changes}) == len(changes)


@pytest.mark.parametrize("field", ["block_size", "num_layers", "num_kv_heads", "head_dim", "dtype"])
def test_a_wrong_layout_names_its_field(field: str) -> None:
    sizes: dict[str, Any] = {"block_size": 8, "num_layers": 2, "num_kv_heads": 4, "head_dim": 16, "dtype": "float32"}
    with pytest.raises(ConfigError, match=field):
        BlockLayout(**{**sizes, field: "int4" if field == "dtype" else 0})


# --- lifecycle

LEGAL = [(current, following) for current in Stage for following in Stage if following in TRANSITIONS[current]]
ILLEGAL = [pair for pair in ((one, other) for one in Stage for other in Stage) if pair not in LEGAL]


@each(("current", "following"), ILLEGAL)
def test_every_illegal_step_raises(current: Stage, following: Stage) -> None:
    with pytest.raises(AssertionError, match=f"illegal step {current.name} -> {following.name}"):
        advance(current, following)


@each(("current", "following"), LEGAL)
def test_every_legal_step_is_taken(current: Stage, following: Stage) -> None:
    assert advance(current, following) is following


def test_the_table_of_steps() -> None:
    open_stages = {Stage.QUEUED, Stage.PREFILLING, Stage.POOLED, Stage.DECODING}
    assert {stage for stage in Stage if not is_terminal(stage)} == open_stages
    assert all({Stage.ABORTED, Stage.FAILED} <= TRANSITIONS[stage] for stage in open_stages)
    # The holder of a request may be lost: from every stage there is a way back to the queue.
    assert all(Stage.QUEUED in TRANSITIONS[stage] for stage in open_stages - {Stage.QUEUED})
    assert {stage for stage in Stage if Stage.FINISHED in TRANSITIONS[stage]} == {Stage.PREFILLING, Stage.DECODING}


# --- progress


def test_chunks_of_the_docstring() -> None:
    assert plan_chunks(((R1, 700), (R2, 40), (R3, 9)), 720) == ((R1, 700), (R2, 20))


def test_what_one_chunk_leaves_goes_to_the_next() -> None:
    assert plan_chunks(((R1, 5), (R2, 5), (R3, 5)), 12) == ((R1, 5), (R2, 5), (R3, 2))
    assert plan_chunks(((R1, 5), (R2, 5)), 5) == ((R1, 5),)
    assert plan_chunks(((R1, 0), (R2, 5)), 5) == ((R2, 5),)


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_no_chunks(budget: int) -> None:
    assert plan_chunks(((R1, 5),), budget) == ()


# --- requests


@each(
    ("field", "allowed", "refused"),
    [
        ("max_tokens", [0, 1], [-1]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("temperature", [0.0, 2.0], [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [0.01, 1.0], [0.0, 1.1, math.nan]),
        ("top_k", [0, (1 << 31) - 1], [-1, 1 << 31]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.1, 10.0], [0.0, 10.1, math.nan]),
        ("seed", [-(1 << 63), (1 << 63) - 1], [-(1 << 63) - 1, 1 << 63]),
        ("stop_token_ids", [(1,) * MAX_STOP_TOKEN_IDS], [(1,) * (MAX_STOP_TOKEN_IDS + 1)]),
        ("logit_bias", [((1, 100.0),) * MAX_LOGIT_BIAS_ENTRIES], [((1, 1.0),) * (MAX_LOGIT_BIAS_ENTRIES + 1)]),
        ("logit_bias", [((1, -100.0),)], [((1, 100.1),), ((1, math.nan),)]),
        ("num_logprobs", [None, 0, 20], [-1, 21]),
        ("num_prompt_logprobs", [None, 0, 20], [-1, 21]),
    ],
)
def test_bounds_of_sampling(field: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(prompt_len=0)
    assert caught.value.param == "prompt"


def test_context_lengths_of_a_request() -> None:
    assert request(prompt_len=5, max_tokens=7).prompt_len == 5
    assert request(prompt_len=5, max_tokens=7).max_context_len == 12

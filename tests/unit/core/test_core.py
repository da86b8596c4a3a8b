"""Records that all components share: blocks, the lifecycle, chunks, bounds of sampling."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.block_layout import BlockLayout, LayerHeads
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.keep_alive import parse_keep_alive
from alignedserve.core.lifecycle import (
    STEPS_PER_EPOCH,
    TRANSITIONS,
    Stage,
    advance,
    beyond_unreported,
    epoch_end,
    is_report_due,
    is_same_epoch,
    is_terminal,
    next_epoch,
    next_step,
    plan_chunks,
)
from alignedserve.core.metrics import completed_of_arrived, in_percent, token_deadlines
from alignedserve.core.request import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, SamplingParams, Slo
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


# Attempt numbers: epochs, and steps within one.


def test_an_epoch_begins_above_the_latest() -> None:
    first = next_epoch(0, now=0.0)
    assert first == STEPS_PER_EPOCH
    assert next_epoch(first, now=0.0) == 2 * STEPS_PER_EPOCH
    assert next_epoch(epoch_end(first), now=0.0) == 2 * STEPS_PER_EPOCH


def test_an_epoch_is_at_least_the_time_in_milliseconds() -> None:
    assert next_epoch(0, now=12.5) == 12_500 * STEPS_PER_EPOCH
    assert next_epoch(12_500 * STEPS_PER_EPOCH, now=12.5) == 12_501 * STEPS_PER_EPOCH


def test_a_router_that_begins_later_gives_larger_numbers() -> None:
    before = next_epoch(next_epoch(0, now=5.0), now=5.0)
    assert next_epoch(0, now=5.002) > before


def test_as_in_the_docstring_the_pool_takes_it_with_one_step_and_a_decode_worker_with_another() -> None:
    given_out = 3 * STEPS_PER_EPOCH
    assert next_step(given_out) == given_out + 1
    assert next_step(next_step(given_out)) == given_out + 2


def test_a_step_stays_within_its_epoch() -> None:
    given_out = next_epoch(0, now=0.0)
    assert is_same_epoch(given_out, next_step(given_out))
    assert not is_same_epoch(given_out, next_epoch(given_out, now=0.0))


def test_the_end_of_an_epoch_is_behind_all_its_steps_and_before_the_next() -> None:
    given_out = next_epoch(0, now=0.0)
    end = epoch_end(next_step(given_out))
    assert end == epoch_end(given_out) == next_epoch(given_out, now=0.0) - 1
    assert is_same_epoch(given_out, end)


def test_a_year_of_milliseconds_fits_into_a_message() -> None:
    assert epoch_end(next_epoch(0, now=365 * 86_400.0)) <= 1 << 53


def test_what_a_router_gave_out_since_its_last_report_is_below_the_next_ones_numbers() -> None:
    reported, latest = 0, 0
    for now in (1e6, 1e6, 1e6 + 500, 1e6 + 2000):
        latest = next_epoch(latest, now)
        reported = latest if is_report_due(latest, reported) else reported
        assert latest < beyond_unreported(reported)


@each(
    ("given", "seconds"),
    [(0, 0.0), (90, 90.0), ("90", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25),
     (-1, math.inf), ("-1", math.inf), ("-1m", math.inf)],
)  # fmt: skip
def test_times_are_those_of_ollama(given: str | float, seconds: float) -> None:
    assert parse_keep_alive(given) == seconds


@each("given", ["", "m", "5x", "5m5", " 5m", "1e3", "nan", float("nan"), True, 10**9, "999999999h"])
def test_others_are_refused(given: str | float) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_keep_alive(given)


def test_the_configuration_names_the_field() -> None:
    assert ModelSectionConfig(keep_alive="5m").keep_alive_s == 300.0
    assert ModelSectionConfig().keep_alive_s is None
    with pytest.raises(ConfigError, match=r"model\.keep_alive must be"):
        ModelSectionConfig(keep_alive="soon")
    with pytest.raises(ConfigError, match=r"model\.aliases must be"):
        ModelSectionConfig(aliases=("",))


# Shares in percent.


@each(
    ("share", "digits", "words"),
    [
        (1.0, 1, "100.0%"),
        (0.0, 1, "0.0%"),
        (0.7654, 1, "76.5%"),
        (0.9996, 1, "99.96%"),  # four of ten thousand chats were late
        (0.999999, 0, "99.9999%"),
        (0.0002, 1, "0.02%"),
        (1.25, 0, "125%"),
        (1.0 - 1e-15, 2, "100.00%"),  # a sum of floats
    ],
)
def test_only_what_is_whole_reads_as_whole_and_nothing_but_none_as_none(share: float, digits: int, words: str) -> None:
    assert in_percent(share, digits) == words


# Deadlines of tokens, against a schedule that is written out one deadline at a time; and completions by arrivals.


def written_out(slo: Slo, times_s: list[float], ended_s: float | None) -> tuple[int, int]:
    """Count (due, met) of a request that arrived at 0 by a list of every deadline, drawn up anew after a late token."""
    met = missed = 0
    due_s = slo.ttft_s
    waiting = [*times_s, *([] if ended_s is None else [ended_s])]
    for place, time_s in enumerate(waiting):
        is_end = place == len(times_s)
        if due_s is not None:
            if time_s <= due_s and not is_end:
                met += 1
            elif time_s <= due_s:
                missed += 1  # the request ended before the token was due: it will not come
            else:
                passed = [due_s]
                while slo.tpot_s is not None and passed[-1] + slo.tpot_s <= time_s:
                    passed.append(passed[-1] + slo.tpot_s)
                missed += len(passed)
                due_s = time_s
        if slo.tpot_s is None:
            break
        due_s = (time_s if due_s is None else due_s) + slo.tpot_s
    return met + missed, met


@each("seed", range(200))
def test_deadlines_are_those_of_a_schedule_that_is_written_out(seed: int) -> None:
    drawn = random.Random(seed)

    def eighths(most: int) -> float:
        return drawn.randrange(1, most) / 8  # exact in binary: no rounding at a deadline

    slo = Slo(
        ttft_s=eighths(20) if drawn.random() < 0.8 else None, tpot_s=eighths(10) if drawn.random() < 0.8 else None
    )
    times_s = [0.0]
    for _ in range(drawn.randrange(12)):
        times_s.append(times_s[-1] + drawn.choice((0.0, eighths(8), eighths(100))))
    ended_s = times_s[-1] + eighths(50) if drawn.random() < 0.4 else None
    assert token_deadlines(slo, 0.0, times_s[1:], ended_s=ended_s) == written_out(slo, times_s[1:], ended_s)


def test_time_gained_is_carried_over_and_a_stall_misses_every_deadline_that_passes_in_it() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    early = [0.1, *(0.1 + 0.01 * number for number in range(1, 11))]  # the eleventh is due at 2.0
    assert token_deadlines(slo, 0.0, [*early, 2.05]) == (12, 12)
    assert token_deadlines(slo, 0.0, [1.0, 1.1, 1.55, 1.65]) == (7, 3)  # due at 1.2, 1.3, 1.4, 1.5; then from 1.55 on


def test_a_request_that_ends_without_its_tokens_misses_at_least_one() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    assert token_deadlines(slo, 0.0, [], ended_s=0.0) == (1, 0)
    assert token_deadlines(slo, 0.0, [], ended_s=2.1) == (3, 0)
    assert token_deadlines(slo, 0.0, [], ended_s=0.9, is_cut=True) == (0, 0)  # what comes after was not simulated
    assert token_deadlines(slo, 0.0, [], ended_s=2.1, is_cut=True) == (3, 0)
    assert token_deadlines(Slo(), 0.0, [1.0, 2.0], ended_s=9.0) == (0, 0)
    assert token_deadlines(Slo(ttft_s=1.0), 0.0, [0.5], ended_s=9.0) == (1, 1)  # no objective for those after it


def test_several_tokens_at_one_recorded_time_have_as_many_steps() -> None:
    assert token_deadlines(Slo(tpot_s=0.125), 0.0, [0.0, 0.25, 0.5], pace=2.0) == (2, 2)
    assert token_deadlines(Slo(tpot_s=0.125), 0.0, [0.0, 0.25, 0.5]) == (4, 0)


def test_completions_by_arrivals_see_a_queue_that_grows() -> None:
    arrivals_s = [float(number) for number in range(101)]
    assert completed_of_arrived(arrivals_s, [time_s + 10 for time_s in arrivals_s]) == 1.0
    assert completed_of_arrived(arrivals_s, [2 * time_s for time_s in arrivals_s]) == 0.5
    burst = completed_of_arrived([0.01 * number for number in range(300)], [0.3 * number for number in range(300)])
    assert burst == pytest.approx(8 / 240, abs=0.001)  # all are sent in 3 s; nothing is a rate of that
    assert completed_of_arrived([], []) is None
    assert completed_of_arrived([1.0], [2.0]) is None

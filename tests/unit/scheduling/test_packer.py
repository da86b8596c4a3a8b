"""Packing one iteration: blocks, tokens, places and host room to the number, and what is refused."""

from typing import Any

import pytest

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, PlannedEviction, ScheduledRequest, WorkerView
from alignedserve.scheduling.scheduler_state import work_of
from tests.harnesses.scheduling import assert_sound, view_of
from tests.support.marks import each

_DECODE = {"prompt_len": 30, "num_generated": 2}  # 31 tokens cached in two blocks, the 32nd fits into them
_FULL = {"prompt_len": 30, "num_generated": 3}  # 32 tokens cached in two blocks, the 33rd takes a third


def _packer(rows: dict[str, dict[str, Any]], **settings: Any) -> tuple[WorkerView, Packer]:
    view = view_of(rows, **settings)
    return view, Packer(view)


def test_what_is_packed_is_taken_off_every_account() -> None:
    view, packer = _packer(
        {"prompt": {"prompt_len": 40}, "decode": _FULL}, num_blocks=10, max_running_requests=8, max_tokens=64
    )
    assert packer.add(0, 40)
    assert packer.add(1, 1)
    assert (packer.num_free, packer.num_tokens_left, packer.num_places_left) == (8 - 3 - 1, 64 - 41, 6)
    assert packer.work == IterationWork(
        num_prompt_tokens=40,
        num_chunks=1,
        prompt_pairs=820,
        prompt_keys=40,
        prompt_squares=1600,
        num_decodes=1,
        decode_context_len=33,
        max_decode_context_len=33,
        num_sampled=2,
    )
    assert packer.predicted_s() == pytest.approx(0.010 + 0.041 + 0.00033)
    assert packer.plan().scheduled == (ScheduledRequest(0, 40), ScheduledRequest(1, 1))
    assert_sound(view, packer.plan())


@each("limit", [{"num_blocks": 4}, {"max_running_requests": 1}, {"max_tokens": 41}])
def test_what_is_refused_changes_nothing(limit: dict[str, int]) -> None:
    _, packer = _packer({"a": {"prompt_len": 40}, "b": {"prompt_len": 20}}, **limit)
    assert packer.add(0, 40)
    before = (packer.num_free, packer.num_tokens_left, packer.num_places_left, packer.work.copy(), packer.plan())
    assert not packer.add(1, 20)
    assert (packer.num_free, packer.num_tokens_left, packer.num_places_left, packer.work, packer.plan()) == before


def test_what_is_withdrawn_comes_back_to_every_account() -> None:
    _, packer = _packer({"a": {"prompt_len": 40}, "b": _FULL}, num_blocks=10, max_running_requests=8, max_tokens=64)
    packer.add(1, 1)
    alone = (packer.num_free, packer.num_tokens_left, packer.num_places_left, packer.work.copy())
    packer.add(0, 40)
    packer.withdraw(0)
    assert (packer.num_free, packer.num_tokens_left, packer.num_places_left, packer.work) == alone
    assert (0 in packer, packer.rows) == (False, [1])


def test_when_the_longest_decode_is_withdrawn_the_next_one_is_the_longest() -> None:
    _, packer = _packer({"short": _DECODE, "long": _FULL, "longest": {"prompt_len": 60, "num_generated": 2}})
    assert [packer.add(row, 1) for row in (0, 2, 1)] == [True] * 3
    assert packer.withdraw(2) == 1
    assert (packer.work.max_decode_context_len, packer.work.decode_context_len) == (33, 65)
    packer.withdraw(0)
    assert packer.work.max_decode_context_len == 33


def test_a_prompt_is_whole_unless_it_is_longer_than_an_iteration() -> None:
    _, packer = _packer(
        {"fits": {"prompt_len": 48}, "long": {"prompt_len": 49}, "first": {"prompt_len": 10}}, max_tokens=48
    )
    packer.add(2, 10)
    assert (packer.unchunked(0), packer.unchunked(1)) == (48, 38)


@each(
    ("limits", "chunk"),
    [
        ({}, 100),
        ({"max_tokens": 30}, 30),
        ({"num_blocks": 4}, 64),
        ({"num_blocks": 4, "max_tokens": 63}, 63),
        ({"max_running_requests": 0}, 0),
        ({"num_blocks": 0}, 0),
    ],
)
def test_the_largest_chunk_of_a_prompt(limits: dict[str, int], chunk: int) -> None:
    view, packer = _packer({"a": {"prompt_len": 100}}, **limits)
    assert packer.chunk(0) == chunk
    assert chunk == 0 or packer.add(0, chunk)
    assert_sound(view, packer.plan())


def test_a_chunk_fills_up_the_last_block_it_has() -> None:
    _, packer = _packer({"a": {"prompt_len": 100, "num_cached": 20}}, num_blocks=2)
    assert packer.chunk(0) == 12


def test_a_prompt_longer_than_memory_gets_no_more_than_memory() -> None:
    view, packer = _packer({"a": {"prompt_len": 500}}, num_blocks=8, max_tokens=1000)
    assert not packer.add(0, 500)
    assert packer.chunk(0) == 128
    assert packer.add(0, 128)
    assert packer.num_free == 0
    assert_sound(view, packer.plan())


def test_a_dropped_cache_frees_all_its_blocks() -> None:
    view, packer = _packer({"a": _FULL, "b": {"prompt_len": 33}}, num_blocks=3)
    assert not packer.add(1, 33)
    packer.evict(0, EvictionMode.DROP)
    assert packer.num_free == 3
    assert packer.remaining(0) == 33
    assert packer.add(1, 33)
    assert packer.plan().evictions == (PlannedEviction(0, EvictionMode.DROP),)
    assert_sound(view, packer.plan())


def test_a_swap_counts_what_is_copied_and_takes_host_room() -> None:
    view, packer = _packer({"a": _FULL, "b": _FULL}, num_free_host=40)
    packer.evict(0, EvictionMode.SWAP)
    assert packer.work.swap_out_tokens == 32
    packer.evict(1, EvictionMode.SWAP)  # 8 tokens of room are left: not for 32
    assert packer.plan().evictions == (PlannedEviction(0, EvictionMode.SWAP), PlannedEviction(1, EvictionMode.DROP))
    assert packer.work.swap_out_tokens == 32
    assert_sound(view, packer.plan(), is_finished=False)


def test_nothing_comes_back_of_what_is_dropped() -> None:
    """A hidden cache, half of it on the host, becomes one of keys and values: all of it is computed anew."""
    rows = {"a": {"prompt_len": 30, "num_generated": 3, "num_swapped": 16, "is_hidden": True, "num_blocks": 1}}
    view, packer = _packer(rows, hidden_ratio=0.5, num_free_host=100)
    packer.evict(0, EvictionMode.DROP)
    assert packer.chunk(0) == 33
    assert packer.add(0, 33)
    assert packer.work == IterationWork(
        num_prompt_tokens=33, num_chunks=1, prompt_pairs=561, prompt_keys=33, prompt_squares=1089, num_sampled=1
    )
    assert packer.num_free == 1000 - 3
    assert_sound(view, packer.plan())


@each(("num_blocks", "chunk"), [(4, 60), (3, 0)])
def test_a_hidden_cache_is_extended_as_a_whole_or_not(num_blocks: int, chunk: int) -> None:
    rows = {"a": {"prompt_len": 100, "num_cached": 40, "is_hidden": True, "num_blocks": 2}}
    _, packer = _packer(rows, num_blocks=num_blocks, hidden_ratio=0.5)
    assert packer.chunk(0) == chunk


def test_an_upload_takes_blocks_and_a_copy_but_no_place() -> None:
    rows = {"a": {**_FULL, "num_swapped": 32}, "b": {"prompt_len": 20}}
    view, packer = _packer(rows, num_blocks=5, num_free_host=100, swap_width=0.625)
    packer.add(1, 20)
    assert packer.upload(0)
    assert (packer.num_free, packer.num_places_left, packer.rows) == (1, 63, [1])
    assert (packer.work.swap_in_tokens, packer.work.num_tokens) == (20, 20)
    assert packer.plan().uploads == (0,)
    assert_sound(view, packer.plan())
    packer.withdraw(1)
    assert packer.work == IterationWork(swap_in_tokens=20)


def test_an_upload_without_blocks_is_refused() -> None:
    _, packer = _packer({"a": {**_FULL, "num_swapped": 32}}, num_blocks=1, num_free_host=100)
    assert not packer.upload(0)
    assert (packer.num_free, packer.plan().uploads) == (1, ())


@each(("is_hidden", "copied"), [(False, 20), (True, 10)])
def test_a_narrow_copy_counts_by_its_bytes(is_hidden: bool, copied: float) -> None:
    rows = {"a": {**_FULL, "is_hidden": is_hidden}, "b": {**_FULL, "is_hidden": is_hidden, "num_swapped": 32}}
    view, packer = _packer(rows, num_free_host=100, swap_width=0.625, hidden_ratio=0.5)
    packer.evict(0, EvictionMode.SWAP)
    packer.add(1, 1)
    assert (packer.work.swap_out_tokens, packer.work.swap_in_tokens) == (copied, copied)
    assert work_of(view.table, packer.plan(), view.memory) == packer.work


def test_our_own_mistakes_are_caught() -> None:
    rows = {"a": _FULL, "b": {**_FULL, "num_swapped": 32}, "c": {"prompt_len": 5}}
    _, packer = _packer(rows, num_free_host=100)
    packer.add(2, 5)
    with pytest.raises(AssertionError, match="packed twice"):
        packer.add(2, 5)
    with pytest.raises(AssertionError, match="that are not known yet"):
        packer.add(0, 2)
    with pytest.raises(AssertionError, match="nothing of it is on the device"):
        packer.evict(1, EvictionMode.SWAP)
    packer.evict(0, EvictionMode.SWAP)
    with pytest.raises(AssertionError, match="evicted twice"):
        packer.evict(0, EvictionMode.SWAP)
    with pytest.raises(AssertionError, match="swapped out does not compute"):
        packer.add(0, 1)


def test_rows_that_are_sampled_under_a_grammar_are_counted() -> None:
    view, packer = _packer(
        {
            "last chunk": {"prompt_len": 20, "grammar": "g"},
            "chunk": {"prompt_len": 40, "grammar": "g"},
            "decode": {**_DECODE, "grammar": "g"},
            "free": _DECODE,
        }
    )
    for row, num_tokens in enumerate((20, 16, 1, 1)):
        assert packer.add(row, num_tokens)
    assert (packer.work.num_sampled, packer.work.num_constrained) == (3, 2)
    assert work_of(view.table, packer.plan(), view.memory) == packer.work
    packer.withdraw(2)
    assert packer.work.num_constrained == 1


def test_tokens_of_a_prompt_that_are_scored_have_a_row_of_logits_each() -> None:
    view, packer = _packer({"scored": {"prompt_len": 40, "num_prompt_logprobs": 1}, "other": {"prompt_len": 40}})
    assert packer.add(0, 30)
    assert packer.add(1, 30)
    assert packer.work.num_sampled == 30
    assert work_of(view.table, packer.plan(), view.memory).num_sampled == 30
    packer.withdraw(0)
    assert packer.add(0, 40)
    assert packer.work.num_sampled == 40  # 39 scores, and the next token

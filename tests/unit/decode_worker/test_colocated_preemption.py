"""Evictions from a colocated worker's device, and how the caches come back."""

from typing import Any

import pytest

from alignedserve.messages.gateways import AbortRequest, TokenDelta
from alignedserve.messages.iterations import Addition, Swaps
from alignedserve.scheduling.policies import make_policy
from tests.harnesses.colocated import EOS, FOUR, SEVEN, ColocatedHarness, added, decoding, emitted, run, runs, swap
from tests.harnesses.scheduling import Step
from tests.support.samples import R2, blocks, request

# --- preemption


def test_who_was_dropped_computes_all_it_had_and_goes_on() -> None:
    made = decoding(num_blocks=4)
    assert made.follow(Step(r1=1, drop=["r2"])) == [run(removals=("r2",), grown=[("r1", 1)], r1=1)]
    made.script.steps.append(Step(r2=8))
    again = added(SEVEN, 2, 3, generated=(7,))
    assert runs(made.sampled(r1=8)) == [run(again, r2=8)]
    assert made.sampled(r2=9) == [emitted(TokenDelta(R2, 1, (9,)))]  # and its prompt is done once only
    assert made.loads[-1].num_recomputed_tokens == 7  # its first answer token had no cache yet


def test_who_is_swapped_out_leaves_its_blocks_and_the_engine() -> None:
    made = decoding()
    swaps = Swaps((), (swap("r2", 7, 1, 2),), ())
    assert made.follow(Step(r1=1, swap=["r2"])) == [run(removals=("r2",), grown=[("r1", 1)], swaps=swaps, r1=1)]


def swapped(**sizes: Any) -> ColocatedHarness:
    """r2 is on the host with its seven tokens, and nothing runs; r1 holds blocks 0 and 1."""
    made = decoding(**sizes)
    made.follow(Step(r1=1, swap=["r2"]))
    made.sampled(r1=8)
    return made


def test_who_was_swapped_out_comes_back_with_its_cache() -> None:
    made = swapped()
    swaps = Swaps((), (), (swap("r2", 7, 2, 3),))
    again = Addition(SEVEN, (7,), blocks(2, 3), 7)
    assert made.follow(Step(r2=1)) == [run(again, swaps=swaps, r2=1)]


def test_one_comes_back_into_blocks_that_another_leaves() -> None:
    made = swapped(num_blocks=4)
    swaps = Swaps((), (swap("r1", 5, 0, 1),), (swap("r2", 7, 0, 1),))
    again = Addition(SEVEN, (7,), blocks(0, 1), 7)
    assert made.follow(Step(r2=1, swap=["r1"])) == [run(again, removals=("r1",), swaps=swaps, r2=1)]


def test_who_is_uploaded_has_its_cache_back_but_computes_nothing() -> None:
    made = swapped()
    swaps = Swaps((), (), (swap("r2", 7, 2, 3),))
    assert made.follow(Step(r1=1, upload=["r2"])) == [run(swaps=swaps, r1=1)]
    made.script.steps.append(Step(r2=1))
    assert runs(made.sampled(r1=9)) == [run(Addition(SEVEN, (7,), blocks(2, 3), 7), r2=1)]


def test_a_copy_on_the_host_of_who_has_ended_is_forgotten() -> None:
    made = swapped()
    made.hear(AbortRequest(R2))
    assert made.follow(Step(r1=1)) == [run(swaps=Swaps((R2,), (), ()), r1=1)]


def test_a_copy_on_the_host_of_who_is_dropped_is_forgotten() -> None:
    made = swapped()
    assert made.follow(Step(r1=1, drop=["r2"])) == [run(swaps=Swaps((R2,), (), ()), r1=1)]
    made.sampled(r1=9)
    assert made.view.memory.num_free_host == 100


def test_the_policy_sees_what_is_swapped_out() -> None:
    made = swapped()
    memory, table = made.view.memory, made.view.table
    assert (memory.num_free, memory.num_free_host) == (18, 93)
    assert (table.num_cached.tolist(), table.num_swapped.tolist()) == ([5, 7], [0, 7])
    assert (table.num_blocks.tolist(), table.num_preemptions.tolist()) == ([2, 0], [0, 1])


def test_a_plan_with_only_evictions_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="evictions without a scheduled request"):
        decoding().follow(Step(drop=["r1"]))


# --- with a real policy


SIX = request("r2", prompt_len=6)


def crowded(preemption: str) -> ColocatedHarness:
    """Both fill four blocks, r1 with six tokens and r2 with eight, and compute the last of them."""
    made = ColocatedHarness(num_blocks=4, policy=make_policy("fcfs", {"preemption": preemption}))
    made.begin(FOUR)
    made.begin(SIX)
    assert runs(made.sampled(r1=7)) == [run(added(SIX, 1, 2), r2=6)]
    assert runs(made.sampled(r2=7)) == [run(grown=[("r1", 3)], r1=1, r2=1)]
    assert runs(made.sampled(r1=7, r2=8)) == [run(r1=1, r2=1)]
    return made


def test_fcfs_drops_who_came_last_and_computes_it_again_when_there_is_room() -> None:
    made = crowded("drop")
    assert runs(made.sampled(r1=7, r2=9)) == [run(removals=("r2",), r1=1)]
    again = added(SIX, 0, 3, 1, generated=(7, 8, 9))
    assert runs(made.sampled(r1=EOS)) == [run(again, removals=("r1",), r2=9)]
    assert made.sampled(r2=10)[1] == emitted(TokenDelta(R2, 3, (10,)))


def test_fcfs_swaps_who_came_last_and_takes_it_back_when_there_is_room() -> None:
    made = crowded("swap")
    outs = Swaps((), (swap("r2", 8, 1, 2),), ())
    assert runs(made.sampled(r1=7, r2=9)) == [run(removals=("r2",), swaps=outs, r1=1)]
    again = added(SIX, 0, 3, 1, generated=(7, 8, 9), num_cached=8)
    ins = Swaps((), (), (swap("r2", 8, 0, 3, 1),))
    assert runs(made.sampled(r1=EOS)) == [run(again, removals=("r1",), swaps=ins, r2=1)]
    assert made.sampled(r2=10)[1] == emitted(TokenDelta(R2, 3, (10,)))

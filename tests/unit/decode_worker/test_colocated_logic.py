"""The colocated worker, decision by decision: twenty blocks of four tokens, requests named by its script."""

from typing import Any

import msgspec
import pytest

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, SampledToken, SamplingParams, TokenLogprob
from alignedserve.messages.caches import BlocksTaken
from alignedserve.messages.cluster_view import BatchShape, IterationLogTotals
from alignedserve.messages.events import PeerConnected, SendTo, Ticked
from alignedserve.messages.gateways import AbortRequest, PromptScored, TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, IterationTimes, PromptScores, Swaps
from alignedserve.messages.workers import (
    AttemptFailed,
    DecodedRequest,
    IterationLogReport,
    PrefillCompleted,
    RequestFinished,
    SetPredictedLength,
    WorkerLoad,
)
from alignedserve.scheduling.policies import make_policy
from tests.harnesses.colocated import (
    EOS,
    FOUR,
    SEVEN,
    ColocatedHarness,
    added,
    decoding,
    emitted,
    run,
    runs,
    swap,
    to_router,
)
from tests.harnesses.scheduling import Step
from tests.support.marks import each
from tests.support.samples import R1, R2, REPLY_TO, ROUTER, blocks, request


def prompting() -> ColocatedHarness:
    """r1 computes its prompt of four tokens, in block 0."""
    made = ColocatedHarness()
    made.begin(FOUR)
    made.follow(Step(r1=4))
    return made


# --- introductions and reports


def test_the_router_is_told_what_this_worker_is_and_how_it_is_loaded() -> None:
    made = ColocatedHarness()
    assert made.do(PeerConnected(Role.ROUTER, ROUTER)) == [to_router(made.registered)]
    assert made.loads == [WorkerLoad(num_free_blocks=20)] * 2


def test_the_load_counts_who_waits_runs_and_was_preempted() -> None:
    made = decoding()
    assert made.loads[-1] == WorkerLoad(num_waiting=2, num_free_blocks=17)
    made.follow(Step(r1=1, drop=["r2"]))
    assert made.loads[-1] == WorkerLoad(num_waiting=1, num_running=1, num_free_blocks=18, num_evictions=1)


def test_a_load_that_is_as_before_is_not_told_again() -> None:
    made = decoding()
    made.do(Ticked())
    made.loads.clear()
    assert made.do(Ticked()) == []
    assert made.loads == []


def test_what_the_ledger_gained_is_told_with_a_tick() -> None:
    made = ColocatedHarness()
    made.now = 1.0
    made.begin(request(arrival_s=0.5))
    made.follow(Step(r1=4))
    made.now = 2.0
    made.completed(SampledToken(R1, EOS), times=IterationTimes(1.0, 2.0, 0.25, 0.5, 0.25))
    gained = IterationLogTotals(
        num_iterations=1,
        num_requests=1,
        wall_s=1.0,
        prepare_s=0.25,
        forward_s=0.5,
        sampling_s=0.25,
        sum_of_spreads=1.0,
        spread_counts=(1, *(0,) * 16),
    )
    assert made.do(Ticked()) == [to_router(IterationLogReport(gained, 1, BatchShape(1, 4, 4.0, 4)))]


# --- coming in


def test_a_chunk_takes_blocks_for_what_it_computes_and_the_next_one_more() -> None:
    made = ColocatedHarness()
    made.begin(SEVEN)
    assert made.follow(Step(r2=4)) == [run(added(SEVEN, 0), r2=4)]
    made.follow(Step(r2=3))
    assert made.completed() == [run(grown=[("r2", 1)], r2=3)]


def test_what_was_generated_elsewhere_is_computed_with_the_prompt() -> None:
    made = ColocatedHarness()
    made.begin(FOUR, 3, 8, 9)
    assert made.follow(Step(r1=6)) == [run(added(FOUR, 0, 1, generated=(8, 9)), r1=6)]
    assert made.sampled(r1=5) == [emitted(TokenDelta(R1, 2, (5,))), to_router(PrefillCompleted(R1, 3, 6))]


def test_what_no_memory_of_this_worker_holds_is_refused() -> None:
    reason = "its context needs more cache blocks than a worker has"
    assert ColocatedHarness(num_blocks=2).begin(request(max_tokens=5)) == [
        to_router(AttemptFailed(R1, 1, FailureKind.UNSERVABLE, reason))
    ]


def test_what_just_fits_is_not_refused() -> None:
    made = ColocatedHarness(num_blocks=2)
    made.begin(request(max_tokens=4))
    assert runs(made.follow(Step(r1=4))) == [run(added(request(max_tokens=4), 0), r1=4)]


def test_a_late_prediction_replaces_it() -> None:
    made = ColocatedHarness()
    made.begin(FOUR, predicted_output_len=6.5)
    made.hear(SetPredictedLength(R1, 1, 3.5))
    assert made.view.table.predicted_len.tolist() == [3.5]


@each("message", [SetPredictedLength(R1, 2, 3.5), SetPredictedLength(R2, 1, 3.5)])
def test_a_prediction_of_another_attempt_or_request_changes_nothing(message: SetPredictedLength) -> None:
    made = ColocatedHarness()
    made.begin(FOUR, predicted_output_len=6.5)
    assert made.hear(message) == []
    assert made.view.table.predicted_len.tolist() == [6.5]


# --- tokens


def test_with_the_first_token_the_router_hears_that_the_prompt_is_done() -> None:
    made = prompting()
    made.script.steps.append(Step(r1=1))
    assert made.sampled(r1=8) == [
        run(grown=[("r1", 1)], r1=1),
        emitted(TokenDelta(R1, 0, (8,))),
        to_router(PrefillCompleted(R1, 1, 4)),
    ]
    assert made.sampled(r1=9) == [emitted(TokenDelta(R1, 1, (9,)))]


def test_tokens_for_one_gateway_travel_together() -> None:
    made = ColocatedHarness()
    other = request("r3", prompt_len=1, reply_to="unix:other")
    for one in (FOUR, other, request("r2", prompt_len=2)):
        made.begin(one)
    made.follow(Step(r1=4, r3=1, r2=2))
    assert made.sampled(r1=8, r3=9, r2=10)[:2] == [
        emitted(TokenDelta(R1, 0, (8,)), TokenDelta(R2, 0, (10,))),
        SendTo("unix:other", TokensEmitted((TokenDelta(RequestId("r3"), 0, (9,)),))),
    ]


def test_logprobs_go_with_their_token() -> None:
    logprob = TokenLogprob(8, -0.5)
    assert prompting().completed(SampledToken(R1, 8, logprob))[0] == emitted(TokenDelta(R1, 0, (8,), (logprob,)))


@each(("token_id", "max_tokens", "reason"), [(EOS, 8, FinishReason.STOP), (8, 1, FinishReason.LENGTH)])
def test_the_last_token_says_so_and_ends_it(token_id: int, max_tokens: int, reason: FinishReason) -> None:
    made = ColocatedHarness()
    made.begin(request(max_tokens=max_tokens))
    made.follow(Step(r1=4))
    assert made.sampled(r1=token_id) == [
        emitted(TokenDelta(R1, 0, (token_id,), (), reason)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 1)),
    ]
    assert made.loads[-1] == WorkerLoad(num_free_blocks=20)


def test_scores_of_a_prompt_go_before_its_end_and_no_token_does() -> None:
    made = ColocatedHarness()
    made.begin(request(sampling=SamplingParams(max_tokens=0, num_prompt_logprobs=0)))
    made.follow(Step(r1=4))
    entries = (TokenLogprob(11, -1.0),)
    assert made.completed(SampledToken(R1, 9), prompt_scores=(PromptScores(R1, 1, entries),)) == [
        SendTo(REPLY_TO, PromptScored(R1, 1, entries)),
        emitted(TokenDelta(R1, 0, (), (), FinishReason.LENGTH)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 0)),
    ]


def test_a_model_without_usable_logits_fails_the_request() -> None:
    made = prompting()
    reason = "the model gave no usable logits"
    assert made.completed(failed=(R1,)) == [to_router(AttemptFailed(R1, 1, FailureKind.INTERNAL, reason))]
    assert made.loads[-1] == WorkerLoad(num_free_blocks=20)


# --- aborts, attempts, routers


def test_aborted_in_an_iteration_its_token_is_not_sent() -> None:
    made = prompting()
    assert made.hear(AbortRequest(R1)) == []
    assert made.sampled(r1=8) == []
    assert made.loads[-1] == WorkerLoad(num_free_blocks=20)


def test_aborted_between_two_iterations_it_leaves_the_engine_with_the_next() -> None:
    made = decoding()
    made.hear(AbortRequest(R1))
    assert made.follow(Step(r2=1)) == [run(removals=("r1",), r2=1)]


def test_aborted_while_others_compute_it_leaves_after_them() -> None:
    made = decoding()
    made.follow(Step(r2=1), Step(r2=1))
    made.hear(AbortRequest(R1))
    assert runs(made.sampled(r2=8)) == [run(removals=("r1",), grown=[("r2", 0)], r2=1)]


def test_word_of_an_unknown_request_or_an_earlier_attempt_is_ignored() -> None:
    made = ColocatedHarness()
    made.begin(FOUR, 2)
    made.follow(Step(r1=4))
    assert made.hear(AbortRequest(R2)) == []
    assert made.hear(AbortRequest(R1, 1)) == []
    assert made.sampled(r1=8)[0] == emitted(TokenDelta(R1, 0, (8,)))


def test_a_later_attempt_takes_the_place_of_one_that_waits() -> None:
    made = ColocatedHarness()
    made.begin(FOUR)
    made.begin(FOUR, 2, 8)
    assert made.follow(Step(r1=5)) == [run(added(FOUR, 0, 1, generated=(8,)), r1=5)]


def test_a_later_attempt_waits_for_the_end_of_the_iteration() -> None:
    made = prompting()
    made.script.steps.append(Step(r1=5))
    assert made.begin(FOUR, 2, 8) == []
    assert made.sampled(r1=8) == [run(added(FOUR, 0, 1, generated=(8,)), removals=("r1",), r1=5)]
    assert made.sampled(r1=9) == [emitted(TokenDelta(R1, 1, (9,))), to_router(PrefillCompleted(R1, 2, 5))]


def test_a_later_attempt_that_waits_can_be_aborted_too() -> None:
    made = prompting()
    made.begin(FOUR, 2, 8)
    made.hear(AbortRequest(R1, 2))
    assert made.sampled(r1=8) == []
    assert made.loads[-1] == WorkerLoad(num_free_blocks=20)


def test_an_abort_of_the_earlier_attempt_leaves_the_later_one_alone() -> None:
    made = prompting()
    made.begin(FOUR, 2, 8)
    made.hear(AbortRequest(R1, 1))
    made.script.steps.append(Step(r1=5))
    assert runs(made.sampled(r1=8)) == [run(added(FOUR, 0, 1, generated=(8,)), removals=("r1",), r1=5)]


def test_a_prediction_for_a_later_attempt_that_waits_is_kept_for_it() -> None:
    made = prompting()
    made.begin(FOUR, 2, 8, predicted_output_len=6.5)
    made.hear(SetPredictedLength(R1, 2, 3.5))
    made.sampled(r1=8)
    assert made.view.table.predicted_len.tolist() == [3.5]


def test_what_decodes_goes_on_when_a_router_comes_back() -> None:
    made = decoding()
    kept = (DecodedRequest(R1, 1, 0), DecodedRequest(R2, 1, 0))
    registered = msgspec.structs.replace(made.registered, latest_attempt=1, decoding=kept)
    assert made.do(PeerConnected(Role.ROUTER, ROUTER)) == [to_router(registered)]
    (iteration,) = runs(made.follow(Step(r1=1, r2=1)))
    assert [request_id for request_id, _ in iteration.slices] == [R1, R2]


def test_a_router_that_comes_back_ends_what_computes_and_what_waits_for_it() -> None:
    made = prompting()
    made.begin(FOUR, 2)
    made.do(PeerConnected(Role.ROUTER, ROUTER))
    assert made.sampled(r1=8) == []
    assert made.loads[-1] == WorkerLoad(num_free_blocks=20)


def test_a_message_that_it_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BlocksTaken"):
        ColocatedHarness().hear(BlocksTaken(R1, 1, is_accepted=True))


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

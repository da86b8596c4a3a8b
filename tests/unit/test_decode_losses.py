"""The decode worker: stale word, aborts, losses; and computing prompts itself."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, SampledToken, SamplingParams, TokenLogprob
from alignedserve.messages.events import PeerLinked, PeerLost, SendTo
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, LoadBlocks, PromptScores, UnmapArena
from alignedserve.messages.links import (
    AbortRequest,
    BlocksTaken,
    PrefillCompleted,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    TokenDelta,
)
from decode_worker.logic import DecodeCommand
from tests.desks.decode import (
    EOS,
    H1,
    H2,
    Desk,
    added,
    emitted,
    from_pool,
    load,
    loads,
    received,
    released,
    run,
    running,
    runs,
    to_router,
)
from tests.samples import POOL, R1, R2, REPLY_TO, ROUTER, blocks, handoff, request

# --- stale attempts


@pytest.fixture
def second() -> Desk:
    """r1 runs under attempt 2; whatever is said of attempt 1 is stale."""
    made = Desk()
    made.enter(handoff(request(), 11, attempt=2))
    return made


def test_an_abort_of_an_earlier_attempt_changes_nothing(second: Desk) -> None:
    assert second.hear(AbortRequest(R1, 1)) == []
    assert second.sampled(r1=8)[1] == emitted(TokenDelta(R1, 1, (8,)))


def test_an_abort_of_an_earlier_attempt_leaves_a_candidate_alone() -> None:
    made = Desk(max_running=1)
    later = handoff(request(), 11, attempt=2)
    made.enter(H2, later)
    assert made.hear(AbortRequest(R1, 1)) == []
    assert loads(made.sampled(r2=EOS)) == [from_pool(load(later, 0, 1))]


def test_an_abort_of_an_earlier_attempt_leaves_a_copy_alone() -> None:
    made, later = Desk(), handoff(request(), 11, attempt=2)
    (command,) = loads(made.grant(later))
    assert made.hear(AbortRequest(R1, 1)) == []
    assert runs(made.loaded(command)) == [run(added(later, 0, 1), slices={"r1": 1})]


def test_a_later_attempt_ends_the_one_that_runs_and_waits_for_its_end() -> None:
    made = running()
    again = handoff(request(), 14, attempt=2, generated=(7, 8))
    assert made.grant(again) == [received((R1, 2))]
    assert made.sampled(r1=9) == [from_pool(load(again, 0, 1))]


def test_a_later_attempt_takes_the_place_of_a_candidate_whose_lease_goes_back() -> None:
    made = Desk(max_running=1)
    made.enter(H2, H1)
    again = handoff(request(), 14, attempt=2)
    assert made.grant(again) == [received((R1, 2)), released(11)]


def test_word_of_an_unknown_request_is_ignored() -> None:
    assert running().hear(AbortRequest(R2)) == []


# --- aborts, in every stage


def full() -> Desk:
    """r2 runs alone and r1 waits in the pool."""
    made = Desk(max_running=1)
    made.enter(H2, H1)
    return made


def copying_in() -> tuple[Desk, LoadBlocks]:
    """r1 is on its way in."""
    made = Desk()
    (command,) = loads(made.grant(H1))
    return made, command


def test_aborted_as_a_candidate_its_lease_goes_back() -> None:
    assert full().hear(AbortRequest(R1)) == [released(11)]


def test_aborted_while_it_is_copied_in_its_blocks_are_freed_after_the_copy() -> None:
    made, command = copying_in()
    assert made.hear(AbortRequest(R1)) == []
    assert made.loaded(command) == [released(11)]
    assert made.load().num_free_blocks == 20


def test_aborted_while_it_is_copied_in_and_refused_it_is_not_recomputed() -> None:
    made, command = copying_in()
    made.hear(AbortRequest(R1))
    assert made.loaded(command, R1) == [released(11)]


def test_aborted_while_it_runs_its_token_is_not_sent() -> None:
    made = running()
    made.hear(AbortRequest(R1))
    assert made.sampled(r1=9) == []
    assert runs(made.enter(H2)) == [run(added(H2, 0, 1), removals=("r1",), slices={"r2": 1})]


# --- losses, in every stage


def lose_pool(made: Desk) -> list[DecodeCommand]:
    return made.do(PeerLost(Role.KV_POOL, POOL))


def test_the_pool_is_lost_with_the_leases_of_candidates() -> None:
    expected = to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True))
    assert lose_pool(full()) == [UnmapArena(POOL), expected]


def test_the_pool_is_lost_while_a_request_is_copied_in() -> None:
    made, command = copying_in()
    assert lose_pool(made) == [UnmapArena(POOL)]  # what comes of the copy says how it went
    assert runs(made.loaded(command)) == [run(added(H1, 0, 1), slices={"r1": 1})]


def test_the_pool_is_lost_while_a_request_runs() -> None:
    made = running()
    assert lose_pool(made) == [UnmapArena(POOL)]
    assert made.sampled(r1=9)[1] == emitted(TokenDelta(R1, 1, (9,)))


def test_a_colocated_worker_needs_no_pool() -> None:
    made = Desk(max_running=1)
    made.begin(request())
    made.begin(request("r2"))
    assert lose_pool(made) == [UnmapArena(POOL)]
    assert runs(made.sampled(r1=EOS))[0].slices == ((R2, 4),)


def test_another_lost_peer_is_not_noticed() -> None:
    assert full().do(PeerLost(Role.GATEWAY, "gateway-0")) == []


def test_a_router_that_comes_back_empties_the_worker() -> None:
    made = full()
    assert made.do(PeerLinked(Role.ROUTER, ROUTER)) == [to_router(made.registered), released(11)]
    assert made.sampled(r2=8) == []
    assert made.load().num_free_blocks == 20


def test_a_router_that_comes_back_ends_what_is_copied_in() -> None:
    made, command = copying_in()
    made.do(PeerLinked(Role.ROUTER, ROUTER))
    assert made.loaded(command) == [released(11)]
    assert made.load().num_free_blocks == 20


# --- colocated


def test_a_prompt_is_computed_here() -> None:
    addition = Addition(request(), (), blocks(0))
    assert Desk().begin(request()) == [run(addition, slices={"r1": 4})]


def test_the_first_token_of_a_prompt_is_reported_to_the_router() -> None:
    made = Desk()
    made.begin(request())
    assert made.sampled(r1=8) == [
        run(grown=[("r1", 1)], slices={"r1": 1}),
        emitted(TokenDelta(R1, 0, (8,))),
        to_router(PrefillCompleted(R1, 1, 4)),
    ]
    assert made.sampled(r1=9)[1:] == [emitted(TokenDelta(R1, 1, (9,)))]


def test_prompts_share_what_the_decodes_leave() -> None:
    made = Desk(max_tokens=10)
    made.begin(request())
    made.begin(request("r2", prompt_len=13))
    made.begin(request("r3", prompt_len=5))
    assert runs(made.sampled(r1=8))[0].slices == ((R1, 1), (R2, 9))
    assert runs(made.sampled(r1=9))[0].slices == ((R1, 1), (R2, 4), (RequestId("r3"), 5))


def test_decodes_always_go_in_and_prompts_get_one_token_at_least() -> None:
    made = Desk(max_tokens=2)
    made.enter(H1, H2)
    made.begin(request("r3", prompt_len=5))
    assert runs(made.sampled(r1=8, r2=8))[0].slices == ((R1, 1), (R2, 1), (RequestId("r3"), 1))


def test_with_decodes_alone_the_budget_does_not_matter() -> None:
    made = Desk(max_tokens=1)
    assert runs(made.enter(H1, H2))[0].slices == ((R1, 1), (R2, 1))


def test_the_last_token_of_a_prompt_counts_as_a_decode() -> None:
    made = Desk(max_tokens=4)
    made.begin(request(prompt_len=5))
    assert runs(made.completed())[0].slices == ((R1, 1),)


def test_scores_of_a_prompt_go_before_its_end() -> None:
    made = Desk()
    made.begin(request(sampling=SamplingParams(max_tokens=0, num_prompt_logprobs=0)))
    entries = (TokenLogprob(11, -1.0),)
    assert made.completed(SampledToken(R1, 9), prompt_scores=(PromptScores(R1, 1, entries),)) == [
        SendTo(REPLY_TO, PromptScored(R1, 1, entries)),
        emitted(TokenDelta(R1, 0, (), (), FinishReason.LENGTH)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 0)),
    ]


def test_a_prompt_is_aborted_between_two_chunks() -> None:
    made = Desk()
    made.begin(request(prompt_len=13))
    made.hear(AbortRequest(R1))
    assert made.completed() == []
    assert made.load().num_free_blocks == 20


def test_a_message_that_it_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BlocksTaken"):
        Desk().hear(BlocksTaken(R1, 1, is_accepted=True))

"""A separate decode worker whose policy decides: preemption, caches on the host, and candidates that it chooses.

Blocks of four tokens. Requests have one token more than their prompt, whose cache is here.
"""

from collections import deque

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import Handoff
from alignedserve.messages.events import Send
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.iterations import LoadBlocks, RunIteration, Swap, Swaps
from alignedserve.messages.workers import AttemptFailed, RequestPreempted
from alignedserve.scheduling.policy import CandidateChoice
from tests.harnesses.decode import DecodeHarness, added, loads, runs, to_router
from tests.harnesses.scheduling import Script, Step
from tests.support.samples import R1, R2, R3, blocks, handoff, request


def granted(name: str, prompt_len: int, max_tokens: int = 20) -> Handoff:
    return handoff(request(name, prompt_len=prompt_len, max_tokens=max_tokens), int(name[1:]) + 10)


def scripted(*steps: Step, num_blocks: int = 20, host_tokens: int = 0) -> DecodeHarness:
    script = Script()
    script.steps.extend(steps)
    return DecodeHarness(num_blocks=num_blocks, policy=script, host_tokens=host_tokens)


def test_the_policy_says_who_computes_and_who_pauses_keeps_its_blocks() -> None:
    made = scripted(Step(r1=1), Step(r2=1))
    (first,) = runs(made.enter(granted("r1", 7), granted("r2", 3)))
    assert first.slices == ((R1, 1),)
    (second,) = runs(made.sampled(r1=7))
    assert (second.slices, second.removals) == (((R2, 1),), ())


def test_a_block_is_allocated_with_the_token_that_needs_it() -> None:
    made = scripted(Step(r1=1), Step(r1=1))
    (first,) = runs(made.enter(granted("r1", 8)))
    assert first.additions[0].block_ids == blocks(0, 1, 2)  # eight tokens came in two
    (second,) = runs(made.sampled(r1=7))
    assert second.extensions == ()


def test_who_is_dropped_is_computed_again_by_a_prefill_worker_with_what_it_has_generated() -> None:
    made = scripted(Step(r1=1, r2=1), Step(r2=1, drop=["r1"]), Step(r2=1))
    made.enter(granted("r1", 7), granted("r2", 3))
    dropping = made.sampled(r1=5, r2=5)
    assert runs(dropping)[0].removals == (R1,)
    then = made.sampled(r2=6)
    assert to_router(RequestPreempted(R1, 1, (7, 5))) in then
    assert [(run.additions, run.slices) for run in runs(then)] == [((), ((R2, 1),))]


def test_who_is_swapped_comes_back_from_the_host() -> None:
    made = scripted(Step(r1=1, r2=1), Step(r2=1, swap=["r1"]), Step(r1=1, r2=1), host_tokens=40)
    made.enter(granted("r1", 7), granted("r2", 3))
    (out,) = runs(made.sampled(r1=5, r2=5))
    assert out.swaps == Swaps((), (Swap(R1, 8, blocks(0, 1)),), ())
    (back,) = runs(made.sampled(r2=6))
    assert back.swaps is not None
    assert [(swap.request_id, swap.num_tokens) for swap in back.swaps.ins] == [(R1, 8)]


def test_nothing_is_loaded_into_blocks_that_are_still_copied_to_the_host() -> None:
    made = scripted(Step(r1=1), Step(swap=["r1"], r2=1), Step(r2=1), num_blocks=4, host_tokens=40)
    made.enter(granted("r1", 11, max_tokens=5))
    assert loads(made.grant(granted("r2", 11, max_tokens=5), batch=2)) == []
    out = made.sampled(r1=5)  # the policy takes r2 in for r1: the copy comes first
    assert [run.slices for run in runs(out)] == [()]
    assert loads(out) == []
    assert [part.request_id for one in loads(made.completed()) for part in one.loads] == [R2]


def test_a_candidate_for_which_blocks_are_short_enters_where_the_policy_drops_another_for_it() -> None:
    made = scripted(Step(r1=1), Step(drop=["r1"], r2=1), Step(r2=1), num_blocks=4)
    made.enter(granted("r1", 11, max_tokens=5))
    assert loads(made.grant(granted("r2", 11, max_tokens=5), batch=2)) == []
    commands = made.sampled(r1=5)
    assert runs(commands) == []
    (load,) = loads(commands)
    assert isinstance(load, LoadBlocks)
    (iteration,) = runs(made.loaded(load))
    assert isinstance(iteration, RunIteration)
    assert (iteration.removals, iteration.slices) == ((R1,), ((R2, 1),))


@pytest.mark.parametrize(("num_blocks", "is_offered"), [(8, True), (7, False)])
def test_a_chat_may_displace_a_document_where_all_chats_then_have_room_to_grow(
    num_blocks: int, is_offered: bool
) -> None:
    """Chats took a document's blocks to the last one, and were dropped a few tokens later, one for the other."""
    script = Script(deque([Step(r1=1, r2=1), Step(r1=1, r2=1)]))
    made = DecodeHarness(num_blocks=num_blocks, policy=script, choice=CandidateChoice.OVER_BEST_EFFORT)
    document = request("r2", prompt_len=7, max_tokens=5, request_class=RequestClass.BEST_EFFORT)
    made.enter(granted("r1", 11, max_tokens=5), handoff(document, 12))
    made.grant(granted("r3", 11, max_tokens=5), batch=2)  # three blocks, and one as it grows
    made.sampled(r1=5, r2=5)
    assert script.view is not None
    assert (R3 in script.view.table.request_ids) == is_offered


def test_one_that_is_chosen_and_given_up_meanwhile_leaves_no_block_behind() -> None:
    made = scripted(Step(r1=1), Step(drop=["r1"], r2=1), num_blocks=4)
    made.enter(granted("r1", 11, max_tokens=5))
    made.grant(granted("r2", 11, max_tokens=5), batch=2)
    (load,) = loads(made.sampled(r1=5))
    made.logic._abort(RequestId("r1"))
    made.logic._abort(RequestId("r2"))
    made.loaded(load)
    assert made.load().num_free_blocks == 4


def test_a_request_that_could_not_end_here_even_alone_fails_at_once() -> None:
    made = scripted(num_blocks=4)
    commands = made.grant(granted("r1", 11, max_tokens=20))
    failed = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, AttemptFailed)]
    assert [one.kind for one in failed] == [FailureKind.UNSERVABLE]


def test_what_the_copy_lacked_is_computed_in_chunks() -> None:
    made = scripted(Step(r1=1))
    of = granted("r1", 7)
    assert runs(made.enter(of)) == [added_run(of)]


def added_run(of: Handoff) -> RunIteration:
    return RunIteration((), (added(of, 0, 1),), (), ((R1, 1),))

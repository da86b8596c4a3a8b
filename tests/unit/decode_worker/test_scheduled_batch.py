"""A separate decode worker whose policy decides: preemption, caches on the host, and candidates that it chooses.

Blocks of four tokens. Requests have one token more than their prompt, whose cache is here.
"""

from collections import deque
from typing import Any

import pytest

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.caches import DecodePace, Handoff
from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import LoadBlocks, RunIteration, Swap, Swaps
from alignedserve.messages.workers import AttemptFailed, RequestPreempted
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import CandidateChoice, DeviceMemory
from alignedserve.scheduling.scheduler_state import MovedProgress, SchedulerState
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.scheduled_batch import ObjectiveAdmission, ScheduledBatch
from decode_worker.load import Pace
from tests.harnesses.decode import DecodeHarness, added, loads, runs, scheduled_batch, to_router
from tests.harnesses.scheduling import EasyCosts, Script, Step
from tests.support.samples import POOL, R1, R2, R3, blocks, handoff, request


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
    assert runs(made.sampled(r1=5, r2=5))[0].removals == (R1,)
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
    commands = scripted(num_blocks=4).grant(granted("r1", 11, max_tokens=20))
    failed = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, AttemptFailed)]
    assert [one.kind for one in failed] == [FailureKind.UNSERVABLE]


def test_what_the_copy_lacked_is_computed_in_chunks() -> None:
    made = scripted(Step(r1=1))
    of = granted("r1", 7)
    assert runs(made.enter(of)) == [added_run(of)]


def added_run(of: Handoff) -> RunIteration:
    return RunIteration((), (added(of, 0, 1),), (), ((R1, 1),))


BEST_EFFORT = RequestClass.BEST_EFFORT
SHARE = 0.9


def candidate(name: str, tpot_s: float | None = None, *, begun_s: float = 0.0, now: float = 0.0) -> Candidate:
    """Build a candidate of a hundred tokens, which add 2 ms; one with an objective is real-time."""
    of = request(name, prompt_len=99, max_tokens=50, **class_of(tpot_s))
    made = Candidate.of_handoff(handoff(of, 1), BatchId(1), now)
    made.first_token_s = now - begun_s
    return made


def class_of(tpot_s: float | None) -> dict[str, Any]:
    if tpot_s is None:
        return {"request_class": BEST_EFFORT}
    return {"request_class": RequestClass.REAL_TIME, "slo": Slo(tpot_s=tpot_s)}


class Worker:
    """Worker with requests of a hundred tokens that run."""

    def __init__(self, *tpots: float | None) -> None:
        self.state = SchedulerState(DeviceMemory(100, 100, 100))
        for number, tpot_s in enumerate(tpots):
            self.state.hold(1)
            of = request(f"running{number}", prompt_len=99, **class_of(tpot_s))
            self.state.attach(of, 0.0, MovedProgress(8.0, 1, 99, 1, 0.0, 0.0))
        self.admission = ObjectiveAdmission(self.state.table, EasyCosts(), SHARE)

    def within(self, *candidates: Candidate, loading: tuple[Candidate, ...] = (), now: float = 0.0) -> list[str]:
        return [str(one.request.request_id) for one in self.admission.within(candidates, loading, now)]


def test_as_many_enter_as_keep_the_gap_of_what_runs() -> None:
    # 12 ms with what runs, 14 and 16 with the candidates; 0.9 * 17 ms are allowed.
    assert Worker(0.017).within(candidate("a", 0.05), candidate("b", 0.05)) == ["a"]


def test_what_is_being_loaded_counts_with_its_objective() -> None:
    assert Worker(None).within(candidate("a"), loading=(candidate("b", 0.017),)) == []


def test_without_objectives_all_enter() -> None:
    waiting = [candidate(f"c{number}") for number in range(20)]
    assert len(Worker(None).within(*waiting)) == 20


def test_one_enters_an_empty_worker_whatever_its_objective() -> None:
    assert Worker().within(candidate("a", 0.001), candidate("b", 0.001)) == ["a"]


def test_a_chat_does_not_wait_for_documents_that_run_and_they_wait_for_it() -> None:
    """They entered while no chat was there; their iteration takes 52 ms, and they pause for chats."""
    worker = Worker(0.017, *[None] * 20)
    given = (candidate("document"), candidate("a", 0.05), candidate("b", 0.05))
    assert worker.within(*given) == ["a"]  # 14 ms of chats; 16 with the other


def test_an_objective_that_no_decode_alone_would_hold_bounds_nothing() -> None:
    assert Worker(0.01).within(candidate("a", 0.05)) == ["a"]


def test_real_time_goes_first_and_of_it_what_is_not_late() -> None:
    late = candidate("late", 0.05, begun_s=60.0, now=60.0)
    given = (candidate("document", now=60.0), late, candidate("chat", 0.05, now=60.0))
    assert Worker(None).within(*given, now=60.0) == ["chat", "late", "document"]


def test_one_that_has_waited_for_a_minute_enters_in_any_case() -> None:
    waiting = candidate("document")
    assert Worker(0.0145).within(waiting, now=59.0) == []
    assert Worker(0.0145).within(waiting, now=60.0) == ["document"]


def told(pace: Pace) -> float | None:
    """Return the time that the pool is told now; None: nothing is said."""
    sent = pace.report()
    if not sent:
        return None
    (send,) = sent
    assert send.peer == POOL
    assert isinstance(send.message, DecodePace)
    return send.message.iteration_s


def decoding(batch: ScheduledBatch, name: str, context_len: int) -> None:
    of = handoff(request(name, prompt_len=context_len - 1), 1)
    candidate = Candidate.of_handoff(of, BatchId(1), 0.0)
    block_ids = batch.blocks_if_fits(candidate)
    assert block_ids is not None, "it does not fit"
    batch.enter(candidate, block_ids, context_len - 1, 0.0)


def test_without_a_cost_model_it_is_the_mean_of_what_ran() -> None:
    pace = Pace(POOL, None)
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) is None  # nothing has run
    pace.note(0.02)
    assert told(pace) == pytest.approx(0.02)
    pace.note(0.03)
    assert told(pace) is None  # 21 ms
    pace.note(0.04)
    assert told(pace) == pytest.approx(0.0229)


def test_with_one_it_is_what_the_requests_that_run_take() -> None:
    batch = scheduled_batch(make_policy("aligned_slo"), num_blocks=200)
    pace = Pace(POOL, batch.decode_s)
    pace.connected(Role.KV_POOL, POOL)
    decoding(batch, "a", 100)
    pace.note(0.5)
    assert told(pace) == pytest.approx(0.012)  # 10 ms, 1 of a token, 1 of its context
    decoding(batch, "b", 400)
    assert told(pace) == pytest.approx(0.017)
    for name in "ab":
        batch.drop(batch[RequestId(name)])
    assert told(pace) == pytest.approx(0.5)  # nothing runs: what did


def test_only_its_own_pool_is_told_and_one_that_is_back_anew() -> None:
    pace = Pace(POOL, None)
    pace.note(0.02)
    pace.connected(Role.KV_POOL, "pool-elsewhere")
    assert told(pace) is None
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) == pytest.approx(0.02)
    pace.disconnected(POOL)
    assert told(pace) is None
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) == pytest.approx(0.02)

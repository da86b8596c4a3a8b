"""Decodes that are handed over: between the workers that are furthest apart, the latest first, and seldom."""

from dataclasses import replace as changed
from typing import Any

from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Slo
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.workers import DecodeDelay, WorkerLoad
from router.leans import FAR_REST_S, HELD_S, MAX_MOVES, REST_S, FarLeans, Leans
from router.logic import make_logic
from router.state import DispatchedPrefill, TrackedRequest, WorkerRecord
from tests.support.marks import each
from tests.support.samples import request, worker

PROMPT = DispatchedPrefill(1, 100)


def elastic(name: str, lean: float, num_decodes: int = 0, **facts: Any) -> WorkerRecord:
    known = {"can_prefill": True, "can_move": True, "max_running_requests": 64, "num_blocks": 320}
    registered = worker(**{**known, **facts})
    made = WorkerRecord(name, registered, WorkerLoad(lean=lean, num_free_blocks=registered.num_blocks))
    made.decoding = {RequestId(f"{name}-{number}") for number in range(num_decodes)}
    return made


def decoded_by(*workers: WorkerRecord) -> dict[RequestId, TrackedRequest]:
    return {
        request_id: TrackedRequest(
            changed(request(request_id), arrival_s=float(request_id.rpartition("-")[2])),
            "gateway-0",
            50.0,
            stage=Stage.DECODING,
            holder=one.name,
        )
        for one in workers
        for request_id in one.decoding
    }


def moved(leans: Leans, *workers: WorkerRecord, now: float = 0.0) -> list[tuple[str, str]]:
    planned = leans.moves(workers, decoded_by(*workers), now)
    return [(str(one.tracked.request.request_id), one.receiver.name) for one in planned]


def test_the_latest_requests_leave_the_worker_without_time_for_the_one_with_most() -> None:
    workers = elastic("a", 0.0, num_decodes=8), elastic("b", 0.5), elastic("c", 1.0)
    assert moved(Leans(), *workers) == [("a-7", "c"), ("a-6", "c")]


def test_every_node_evens_out_for_itself() -> None:
    one, other = elastic("a", 0.0, num_decodes=4), elastic("b", 1.0)
    full = elastic("c", 0.0, num_decodes=8, pool_name="pool-1")  # nothing beside it to take any
    farther, fourth = elastic("d", 0.1, 4, pool_name="pool-2"), elastic("e", 0.9, pool_name="pool-2")
    assert moved(Leans(), full, one, other, farther, fourth) == [("a-3", "b"), ("d-3", "e")]


def test_nothing_moves_between_leans_that_are_near() -> None:
    assert moved(Leans(), elastic("a", 0.1, num_decodes=8), elastic("b", 0.3)) == []


def test_a_worker_with_some_time_gives_only_while_prompts_wait_there() -> None:
    giver, receiver = elastic("a", 0.25, num_decodes=4), elastic("b", 1.0)
    assert moved(Leans(), giver, receiver) == []
    giver.start_prefill(RequestId("r9"), PROMPT)
    assert moved(Leans(), giver, receiver) == [("a-3", "b")]


def test_a_worker_with_prompts_takes_from_one_with_far_more_to_wait_for() -> None:
    giver, receiver = elastic("a", 0.25, num_decodes=4), elastic("b", 1.0)
    receiver.start_prefill(RequestId("r9"), PROMPT)
    assert moved(Leans(), giver, receiver) == []
    giver.start_prefill(RequestId("r8"), DispatchedPrefill(1, 49))  # a quarter of the time: as long as 196
    assert moved(Leans(), giver, receiver) == []
    giver.start_prefill(RequestId("r7"), DispatchedPrefill(1, 1))
    assert moved(Leans(), giver, receiver) == [("a-3", "b")]


def test_a_worker_with_prompts_takes_from_one_whose_decodes_are_late() -> None:
    receiver = elastic("b", 1.0)
    receiver.start_prefill(RequestId("r9"), PROMPT)
    assert moved(Leans(), elastic("a", 0.0, num_decodes=4), receiver) == [("a-3", "b")]
    assert moved(Leans(), elastic("a", 0.1, num_decodes=4), receiver) == []


def test_a_short_answer_with_a_gap_to_hold_stays_as_it_could_not_make_up_for_the_pause() -> None:
    giver, receiver = elastic("a", 0.0, num_decodes=4), elastic("b", 1.0)
    requests = decoded_by(giver)
    for tracked in requests.values():
        tracked.predicted_output_len = 20.0
        tracked.request = changed(tracked.request, slo=Slo(ttft_s=1.0, tpot_s=0.05))
    assert Leans().moves((giver, receiver), requests, 0.0) == []
    requests[RequestId("a-1")].request = changed(requests[RequestId("a-1")].request, slo=Slo())
    (planned,) = Leans().moves((giver, receiver), requests, 0.0)
    assert planned.tracked.request.request_id == "a-1"


def loaded(name: str, num_free: int, num_prompt_tokens: int, num_decodes: int) -> WorkerRecord:
    """Build a worker of 320 blocks of four tokens: it keeps 20 for growth, and each of its decodes comes to hold 14."""
    made = elastic(name, 0.5, num_decodes)
    made.load = WorkerLoad(lean=0.5, num_free_blocks=num_free, prompt_tokens_per_s=1000)
    if num_prompt_tokens:
        made.start_prefill(RequestId(f"{name}-prompt"), DispatchedPrefill(1, num_prompt_tokens))
    return made


def short(num_free: int, num_prompt_tokens: int) -> WorkerRecord:
    return loaded("a", num_free, num_prompt_tokens, 4)


def roomy(num_free: int, num_prompt_tokens: int = 0) -> WorkerRecord:
    return loaded("b", num_free, num_prompt_tokens, 9)


def test_a_worker_short_of_blocks_for_its_prompts_gives_as_many_as_it_lacks() -> None:
    assert moved(Leans(), short(60, 160), roomy(300)) == []
    assert moved(Leans(), short(60, 161), roomy(300)) == [("a-3", "b")]
    assert moved(Leans(), short(45, 160), roomy(300)) == [("a-3", "b"), ("a-2", "b")]
    assert moved(Leans(), short(0, 0), roomy(300)) == []  # nothing waits for blocks


def test_the_smallest_that_frees_enough_leaves_or_the_largest() -> None:
    giver, receiver = short(60, 160), roomy(300)
    requests = decoded_by(giver, receiver)
    for number, length in enumerate((30, 70, 90, 1000)):  # 9, 19, 24 blocks; and 129, as far as is foreseen
        requests[RequestId(f"a-{number}")].predicted_output_len = float(length)

    def given(num_tokens: int) -> list[str]:
        giver.start_prefill(RequestId("a-prompt"), DispatchedPrefill(1, num_tokens))
        return [str(one.tracked.request.request_id) for one in Leans().moves([giver, receiver], requests, 0.0)]

    assert given(160 + 4 * 9) == ["a-0"]
    assert given(160 + 4 * 10) == ["a-1"]
    assert given(160 + 4 * 25) == ["a-3"]
    assert given(160 + 4 * 130) == ["a-3", "a-2"]


def test_prompts_that_it_will_not_soon_compute_do_not_count() -> None:
    assert moved(Leans(), short(4, 100_000), roomy(320)) == [(f"a-{number}", "b") for number in (3, 2, 1, 0)]
    waiting = short(4, 100_000)
    assert waiting.load is not None
    waiting.load = replace(waiting.load, prompt_tokens_per_s=2)
    assert moved(Leans(), waiting, roomy(320)) == [("a-3", "b"), ("a-2", "b")]


def test_the_receiver_keeps_blocks_for_its_prompts() -> None:
    assert moved(Leans(), short(0, 40), roomy(153, 476)) == [("a-3", "b")]
    assert moved(Leans(), short(0, 40), roomy(153, 480)) == []


def test_the_receiver_has_a_quarter_more_free_blocks_afterwards() -> None:
    assert moved(Leans(), short(10, 40), roomy(104)) == [("a-3", "b")]
    assert moved(Leans(), short(10, 40), roomy(103)) == []


def test_the_receiver_has_blocks_for_what_it_takes() -> None:
    giver, receiver = elastic("a", 0.0, num_decodes=8), elastic("b", 1.0)
    receiver.load = WorkerLoad(lean=1.0, num_free_blocks=34)
    assert moved(Leans(), giver, receiver) == [("a-7", "b")]
    receiver.load = WorkerLoad(lean=1.0, num_free_blocks=33)
    assert moved(Leans(), giver, receiver) == []


def test_nothing_goes_to_one_that_drains_or_is_full_or_elsewhere() -> None:
    giver = elastic("a", 0.0, num_decodes=4)
    drains, full = elastic("b", 1.0), elastic("c", 1.0, num_decodes=2, max_running_requests=2)
    drains.is_draining = True
    assert moved(Leans(), giver, drains, full, elastic("d", 1.0, pool_name="pool-1")) == []


def test_a_receiver_never_gets_more_decodes_than_the_giver_keeps() -> None:
    assert moved(Leans(), elastic("a", 0.0, num_decodes=4), elastic("b", 1.0, num_decodes=3)) == []
    assert moved(Leans(), elastic("a", 0.0, num_decodes=1), elastic("b", 1.0)) == []
    assert moved(Leans(), elastic("a", 0.0, num_decodes=9), elastic("b", 1.0, num_decodes=7)) == [("a-8", "b")]


def test_workers_rest_after_a_move() -> None:
    leans, workers = Leans(), (elastic("a", 0.0, num_decodes=4), elastic("b", 1.0))
    assert moved(leans, *workers)
    assert moved(leans, *workers, now=REST_S / 2) == []
    assert moved(leans, *workers, now=REST_S)


def test_each_node_has_its_own_moves() -> None:
    stuck = elastic("a", 0.0, num_decodes=4)  # alone on its node
    giver, receiver = elastic("b", 0.0, num_decodes=2, pool_name="pool-1"), elastic("c", 1.0, pool_name="pool-1")
    assert moved(Leans(), stuck, giver, receiver) == [("b-1", "c")]


def test_requests_that_have_moved_often_or_are_moving_stay() -> None:
    giver, receiver = elastic("a", 0.0, num_decodes=3), elastic("b", 1.0)
    requests = decoded_by(giver)
    requests[RequestId("a-2")].num_moves = MAX_MOVES
    requests[RequestId("a-1")].destination = "b"
    (planned,) = Leans().moves([giver, receiver], requests, 0.0)
    assert planned.tracked is requests[RequestId("a-0")]


def test_a_worker_with_nothing_that_may_leave_keeps_no_other_from_giving() -> None:
    stuck, giver, receiver = elastic("a", 0.0, num_decodes=3), elastic("b", 0.1, num_decodes=4), elastic("c", 1.0)
    requests = decoded_by(stuck, giver)
    for request_id in stuck.decoding:
        requests[request_id].num_moves = MAX_MOVES
    (planned,) = Leans().moves([stuck, giver, receiver], requests, 0.0)
    assert planned.tracked is requests[RequestId("b-3")]


def test_colocated_workers_hand_nothing_over() -> None:
    giver, receiver = elastic("a", 0.0, num_decodes=4), elastic("b", 1.0)
    for one in (giver, receiver):
        one.registered = replace(one.registered, can_move=False)
    assert moved(Leans(), giver, receiver) == []


LATE = elastic("a", 0.0, num_decodes=8)


def elsewhere(name: str, lean: float, num_decodes: int = 0, node: str = "pool-1") -> WorkerRecord:
    return elastic(name, lean, num_decodes, pool_name=node)


def after_the_wish(leans: FarLeans, *workers: WorkerRecord, since_s: float = 0.0) -> list[tuple[str, str]]:
    """Return what moves once the workers have been so for long enough."""
    assert moved(leans, *workers, now=since_s) == []
    return moved(leans, *workers, now=since_s + HELD_S)


def test_nothing_moves_between_nodes_unless_it_is_set() -> None:
    logic = make_logic(config=RouterConfig(), batching=BatchingConfig())
    assert not isinstance(logic._leans, FarLeans)
    logic = make_logic(config=RouterConfig(moves_between_nodes=True), batching=BatchingConfig())
    assert isinstance(logic._leans, FarLeans)


def test_a_request_moves_to_another_node_once_the_wish_has_held() -> None:
    leans = FarLeans(LearnedLinks())
    workers = LATE, elsewhere("b", 1.0)
    assert moved(leans, *workers, now=0.0) == []
    assert [(pair.giver.name, pair.receiver.name) for pair in leans.wished] == [("a", "b")]  # to link meanwhile
    assert moved(leans, *workers, now=HELD_S - 0.25) == []
    assert moved(leans, *workers, now=HELD_S) == [("a-7", "b")]  # one, over a link of which nothing is known


def test_a_wish_that_is_interrupted_begins_anew() -> None:
    leans, receiver = FarLeans(LearnedLinks()), elsewhere("b", 1.0)
    assert moved(leans, LATE, receiver, now=0.0) == []
    assert moved(leans, elastic("a", 0.6, num_decodes=8), receiver, now=0.5) == []
    assert after_the_wish(leans, LATE, receiver, since_s=0.75) == [("a-7", "b")]


def test_a_giver_keeps_to_the_receiver_that_it_links_with() -> None:
    leans, first = FarLeans(LearnedLinks()), elsewhere("b", 0.9)
    assert moved(leans, LATE, first, now=0.0) == []
    assert moved(leans, LATE, first, elsewhere("c", 1.0, node="pool-2"), now=HELD_S) == [("a-7", "b")]


def test_workers_of_one_node_help_each_other_first() -> None:
    leans = FarLeans(LearnedLinks())
    assert moved(leans, LATE, elastic("b", 1.0), elsewhere("c", 1.0), now=0.0) == [("a-7", "b"), ("a-6", "b")]
    assert leans.wished == []


@each(("lean", "of_other"), [(0.1, 0.55), (0.6, 1.0)])
def test_workers_that_are_not_far_apart_are_left_alone(lean: float, of_other: float) -> None:
    assert after_the_wish(FarLeans(LearnedLinks()), elastic("a", lean, num_decodes=8), elsewhere("b", of_other)) == []


def test_both_rest_longer_than_on_one_node() -> None:
    leans, workers = FarLeans(LearnedLinks()), (LATE, elsewhere("b", 1.0))
    assert after_the_wish(leans, *workers) == [("a-7", "b")]
    assert moved(leans, *workers, now=HELD_S + FAR_REST_S - 0.1) == []
    assert after_the_wish(leans, *workers, since_s=HELD_S + FAR_REST_S) == [("a-7", "b")]


def known(block_s: float) -> FarLeans:
    links = LearnedLinks()
    links.observe("b", "a", 100, 100 * block_s)
    return FarLeans(links)


def test_over_a_known_link_as_many_move_as_it_takes_in_time() -> None:
    """Each has 14 blocks of four tokens to hold, a prompt of four: computed again in under a millisecond."""
    leans, receiver = known(1e-6), elsewhere("b", 1.0)
    assert after_the_wish(leans, LATE, receiver) == [("a-7", "b"), ("a-6", "b")]


def test_a_link_slower_than_computing_again_is_not_used() -> None:
    assert after_the_wish(known(1e-3), LATE, elsewhere("b", 1.0)) == []


@each(("tpot_s", "num"), [(None, 1), (0.05, 0), (0.15, 1)])
def test_a_move_takes_a_tenth_of_what_is_left_of_an_answer_at_most(tpot_s: float | None, num: int) -> None:
    """5 013 blocks of 0.098 ms; a second after the first of 50 tokens, 1.5 s are left at 50 ms, 6.5 s at 150 ms."""
    leans, receiver = known(0.98e-4), elastic("b", 1.0, pool_name="pool-1", num_blocks=1 << 20)
    requests = decoded_by(LATE)
    for tracked in requests.values():
        slo = Slo(ttft_s=1.0, tpot_s=tpot_s)
        tracked.request = changed(tracked.request, prompt_token_ids=tuple(range(20_000)), slo=slo)
        tracked.prefilled_s = 0.0
    assert leans.moves((LATE, receiver), requests, 0.0) == []
    assert len(leans.moves((LATE, receiver), requests, HELD_S)) == num


def test_a_context_that_would_delay_all_others_stays() -> None:
    """Of 4 tokens, beside even ones of 2; it may go where longer ones are."""
    giver, receiver = elastic("a", 0.0, num_decodes=8), elastic("b", 1.0)
    load, delay = receiver.load, DecodeDelay(iteration_s=0.01, even_len=2, longer_token_s=1e-6, longest_len=2)
    assert load is not None
    receiver.load = replace(load, delay=delay)
    assert moved(Leans(), giver, receiver) == []
    receiver.load = replace(load, delay=replace(delay, longest_len=1_000))
    assert moved(Leans(), giver, receiver) == [("a-7", "b"), ("a-6", "b")]

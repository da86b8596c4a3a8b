"""Decodes that move between nodes: only where the workers are far apart for long, and the link is fast enough."""

from dataclasses import replace as changed

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.request import Slo
from alignedserve.costmodel.hardware import LearnedLinks
from router.factory import make_logic
from router.moves.far_moves import FAR_REST_S, HELD_S, FarLeans
from router.state import WorkerRecord
from tests.support.marks import each
from tests.unit.router.test_leans import decoded_by, elastic, moved

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

"""Requests packed into the slack of what runs: how many, in which order, and where mixing lengths is for nothing.

An iteration takes 10 ms, 1 ms a token, 10 us a token of context.
"""

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from alignedserve.core.ids import BatchId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.workers import ANY_LENGTH, PACKED_FROM, JoinedBatch
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.slack_packing import PATIENCE_S, SlackPack
from tests.harnesses.decode import BATCH, H1, H2, H3, DecodeHarness
from tests.harnesses.scheduling import EasyCosts
from tests.support.samples import handoff, request

SHARE = 0.8  # so what waits may enter up to 0.9


@dataclass(frozen=True)
class StragglerCosts(EasyCosts):
    """Every sequence costs as much as the longest of the batch."""

    @override
    def iteration_s(self, work: IterationWork) -> float:
        return self.base_s + work.num_decodes * (self.token_s + self.context_s * work.max_decode_context_len)


def candidate(
    name: str, context_len: int = 100, tpot_s: float | None = 0.05, *, max_tokens: int = 50, now: float = 0.0
) -> Candidate:
    objectives: dict[str, Any] = {"request_class": RequestClass.BEST_EFFORT}
    if tpot_s is not None:
        objectives = {"slo": Slo(tpot_s=tpot_s)}
    of = handoff(request(name, prompt_len=context_len - 1, max_tokens=max_tokens, **objectives), 1)
    return Candidate.of_handoff(of, BatchId(1), now)


class Worker:
    """A worker that runs requests of a hundred tokens, each with fifty more to come."""

    def __init__(self, *tpots: float | None, costs: CostModel | None = None) -> None:
        packing = SlackPack(SHARE, costs or EasyCosts())
        self.batch = RunningBatch(num_blocks=200, block_size=100, max_running_requests=90, packing=packing)
        for number, tpot_s in enumerate(tpots):
            self.run(candidate(f"running{number}", tpot_s=tpot_s))

    def run(self, one: Candidate) -> None:
        block_ids = self.batch.blocks_if_fits(one)
        assert block_ids is not None, "it does not fit"
        self.batch.enter(one, block_ids, one.context_len - 1, 0.0)

    def within(self, *candidates: Candidate, now: float = 0.0) -> list[str]:
        assert self.batch.admission is not None
        return [str(one.request.request_id) for one in self.batch.admission.within(candidates, (), now)]


def test_as_many_enter_as_keep_the_gap_of_what_runs() -> None:
    # 12 ms with what runs, 14 and 16 with the candidates; 0.9 * 17 ms are allowed.
    assert Worker(0.017).within(candidate("a"), candidate("b")) == ["a"]


def test_the_shortest_go_first_and_those_of_best_effort_last() -> None:
    waiting = (candidate("long", 400), candidate("document", 20, None), candidate("short", 50))
    assert Worker(0.05).within(*waiting) == ["short", "long", "document"]


def test_one_that_has_waited_is_passed_by_no_other() -> None:
    waiting = (candidate("long", 400), candidate("short", 50, now=PATIENCE_S))
    assert Worker(0.05).within(*waiting, now=PATIENCE_S) == ["long", "short"]
    assert Worker(0.017).within(*waiting, now=PATIENCE_S) == []  # 17 ms with it: so the other waits too


def test_time_that_requests_are_ahead_is_spent_on_short_answers() -> None:
    # It is 40 ms ahead: 2 ms for each of twenty tokens beyond 14.85 ms, so 16 ms; 0.8 ms for each of its 49, so 14 ms.
    short = [candidate(name, max_tokens=21, now=-0.04) for name in "ab"]
    long = [candidate(name, max_tokens=51, now=-0.04) for name in "ab"]
    assert Worker(0.0165).within(*short, now=-0.04) == ["a", "b"]
    assert Worker(0.0165).within(*long, now=-0.04) == ["a"]


def test_without_objectives_all_enter_and_one_enters_alone_in_any_case() -> None:
    assert len(Worker(None).within(*(candidate(f"c{number}", tpot_s=None) for number in range(20)))) == 20
    assert Worker().within(candidate("a", tpot_s=0.001)) == ["a"]


def test_any_length_joins_where_attention_costs_the_sum_and_not_where_it_waits_for_the_longest() -> None:
    for costs, is_free in ((EasyCosts(), True), (StragglerCosts(), False)):
        packing = Worker(0.05, 0.05, costs=costs).batch.packing
        assert packing is not None
        assert packing.mixes_freely() == is_free
        assert packing.is_mixing_cheaper((1000,)) == is_free


def test_a_worker_says_that_any_length_may_join_until_some_wait() -> None:
    made = DecodeHarness(packing=SlackPack(SHARE, EasyCosts()), num_blocks=4, max_running_requests=8)
    made.enter(H1)  # which may come to fill the memory, so that no other enters
    assert told(made) == JoinedBatch(BATCH, PACKED_FROM, ANY_LENGTH)
    made.grant(H2, joins=BATCH)
    assert told(made) == JoinedBatch(BATCH, PACKED_FROM, ANY_LENGTH)
    made.grant(H3, joins=BATCH)
    assert told(made) is None


def test_room_is_for_contexts_that_keep_what_runs_within_its_share() -> None:
    # 12 ms with what runs; a candidate takes 1 ms and 10 us a token. Of 20 ms 16 are allowed: 3 ms, 300 tokens, less
    # 8 that the other grows by meanwhile, in steps of 128.
    for tpot_s, room in ((0.02, 256), (0.016, 0), (None, ANY_LENGTH), (0.01, ANY_LENGTH)):
        packing = Worker(tpot_s).batch.packing
        assert packing is not None
        assert packing.room(()) == room
    packing = Worker(0.02).batch.packing
    assert packing is not None
    assert packing.room([candidate("loading", 200)]) == 0


def told(made: DecodeHarness) -> JoinedBatch | None:
    """Return the lengths that may join, as the router is told with the next load."""
    load = made.logic._counter.report(0, 0, is_due=True)
    assert load is not None
    return load.running

"""Scheduling without evictions: in order of arrival, or by a policy."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig
from alignedserve.core.errors import PolicyError
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.checked_policy import CheckedPolicy
from alignedserve.scheduling.iteration_scheduler import (
    FcfsIterationScheduler,
    IterationScheduler,
    PolicyIterationScheduler,
)
from alignedserve.scheduling.picture_turns import LONGEST_TURN_S, ExpectedTurns, TurnLengths
from alignedserve.scheduling.policies import make_policy, policy_config, policy_entry
from alignedserve.scheduling.policy import (
    EvictionMode,
    IterationLimits,
    IterationPlan,
    PlannedEviction,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.batch_order import BatchOrder, WaitingBatch
from decode_worker.factory import batch_limits_of
from tests.harnesses.scheduling import EasyCosts, Script, Step, decision_of, scheduled_of, seconds_of, view_of
from tests.support.marks import each
from tests.support.samples import handoff, request

R1, R2 = RequestId("r1"), RequestId("r2")
LIMITS = IterationLimits(max_running_requests=4, max_tokens=10)


def enter(
    scheduler: IterationScheduler, name: str, prompt_len: int, num_cached: int = 0, num_generated: int = 0
) -> None:
    of = request(name, prompt_len=prompt_len)
    scheduler.enter(of, 0.0, num_cached=num_cached, num_generated=num_generated, predicted_len=None)


def scripted(*steps: Step) -> tuple[PolicyIterationScheduler, Script]:
    script = Script()
    script.steps.extend(steps)
    return PolicyIterationScheduler(Scheduler(script, EasyCosts(), LIMITS)), script


# --- in order


def test_in_order_shares_the_budget_and_goes_on_where_it_was() -> None:
    scheduler = FcfsIterationScheduler(10)
    enter(scheduler, "r1", 12)
    enter(scheduler, "r2", 12, num_cached=3)
    assert [scheduler.choose(0.0) for _ in range(4)] == [((R1, 10),), ((R1, 2), (R2, 8)), ((R2, 1),), ()]


def test_in_order_counts_what_was_generated_elsewhere() -> None:
    scheduler = FcfsIterationScheduler(10)
    enter(scheduler, "r1", 4, num_generated=2)
    assert scheduler.choose(0.0) == ((R1, 6),)


def test_in_order_passes_over_who_has_left() -> None:
    scheduler = FcfsIterationScheduler(10)
    for name in ("r1", "r2", "r3"):
        enter(scheduler, name, 4)
    scheduler.leave(R2)
    scheduler.leave(R2)  # it may be gone already
    assert scheduler.choose(0.0) == ((R1, 4), (RequestId("r3"), 4))


# --- as a policy says


def test_a_policy_chooses_and_sees_that_no_request_can_be_evicted() -> None:
    scheduler, script = scripted(Step(r2=3))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 9, num_cached=2)
    assert scheduler.choose(1.5) == ((R2, 3),)
    assert script.view is not None
    assert (script.view.can_evict, script.view.now) == (False, 1.5)
    assert script.view.table.num_remaining.tolist() == [4, 7]
    assert (script.view.memory.num_blocks, script.view.memory.num_free) == (2, 0)  # each has its blocks, none is free


def test_what_was_computed_shows_in_the_next_choice() -> None:
    scheduler, script = scripted(Step(r1=4, r2=3))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 9)
    scheduler.choose(0.0)
    scheduler.completed(0.5, 0.25)
    scheduler.choose(0.5)
    assert script.view is not None
    table = script.view.table
    assert (table.num_cached.tolist(), table.num_generated.tolist()) == ([4, 3], [1, 0])
    assert table.first_token_s[0] == 0.5
    assert math.isnan(table.first_token_s[1])
    assert script.view.history.last_s == 0.25


def test_who_is_left_out_gets_no_token_for_the_iteration() -> None:
    scheduler, script = scripted(Step(r2=1))
    enter(scheduler, "r1", 4, num_cached=4, num_generated=1)
    enter(scheduler, "r2", 4, num_cached=4, num_generated=1)
    assert scheduler.choose(0.0) == ((R2, 1),)
    scheduler.completed(0.5, 0.5)
    scheduler.choose(0.5)
    assert script.view is not None
    assert script.view.table.num_generated.tolist() == [1, 2]


def test_who_has_left_or_never_came_is_nothing_to_it() -> None:
    scheduler, script = scripted()
    enter(scheduler, "r1", 4)
    for name in (R1, R1, R2):
        scheduler.leave(name)
        scheduler.set_predicted_length(name, 5.0)
    assert scheduler.choose(0.0) == ()
    assert script.view is not None
    assert len(script.view.table) == 0


def test_a_late_prediction_is_seen() -> None:
    scheduler, script = scripted()
    enter(scheduler, "r1", 4)
    scheduler.set_predicted_length(R1, 5.0)
    scheduler.choose(0.0)
    assert script.view is not None
    assert script.view.table.predicted_len.tolist() == [5.0]


def test_a_policy_that_evicts_here_breaks_an_invariant() -> None:
    scheduler, _ = scripted(Step(r1=1, drop=["r2"]))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 4)
    with pytest.raises(AssertionError, match="evictions on a worker that cannot evict"):
        scheduler.choose(0.0)


def test_everyone_takes_decodes_first_and_prompts_in_order() -> None:
    scheduler = PolicyIterationScheduler(Scheduler(make_policy("aligned"), EasyCosts(), LIMITS))
    enter(scheduler, "r1", 12)
    enter(scheduler, "r2", 4, num_cached=4, num_generated=1)
    assert scheduler.choose(0.0) == ((R2, 1), (R1, 9))


# Plans of a policy from another package: followed where a worker can, refused with what is wrong where it cannot.

ROWS = {"prompt": {"prompt_len": 40}, "decode": {"prompt_len": 30, "num_generated": 3}}  # its 33rd token takes a block
DROP = PlannedEviction(1, EvictionMode.DROP)


class Planned:
    def __init__(self, plan: IterationPlan) -> None:
        self._plan = plan

    def plan(self, view: WorkerView) -> IterationPlan:
        return self._plan


def scheduled(*parts: tuple[int, int], **more: object) -> IterationPlan:
    return IterationPlan(tuple(ScheduledRequest(*part) for part in parts), **more)  # type: ignore[arg-type]


@each("plan", [scheduled((0, 40)), scheduled((1, 1)), scheduled((0, 40), evictions=(DROP,)), scheduled()])
def test_a_plan_that_fits_is_followed(plan: IterationPlan) -> None:
    assert CheckedPolicy("mine", Planned(plan)).plan(view_of(ROWS, num_blocks=5)) is plan


@each(
    ("plan", "reason"),
    [
        (scheduled((0, 40), (1, 1)), "more blocks than are free (3 before its evictions)"),
        (scheduled((0, 41)), "41 tokens of a request that has 40 to compute"),
        (scheduled((1, 0)), "0 tokens of a request that has 1 to compute"),
        (scheduled((2, 1)), "row 2, and there are 2 requests"),
        (scheduled((-1, 1)), "row -1, and there are 2 requests"),
        (scheduled((1, 1), (1, 1)), "one request twice"),
        (scheduled((0, 40), evictions=(DROP, DROP)), "one request twice"),
        (scheduled((1, 1), evictions=(DROP._replace(row=0),)), "an eviction of a request without a cache here"),
    ],
)
def test_a_plan_beyond_memory_or_requests_is_refused(plan: IterationPlan, reason: str) -> None:
    with pytest.raises(PolicyError) as refused:
        CheckedPolicy("mine", Planned(plan)).plan(view_of(ROWS, num_blocks=5))
    assert str(refused.value) == f"policy 'mine' planned {reason}"


@each(
    ("limit", "reason"),
    [
        ({"max_tokens": 40}, "more than 40 tokens in one iteration"),
        ({"max_running_requests": 1}, "more than 1 requests in one iteration"),
    ],
)
def test_a_plan_beyond_limits_is_refused(limit: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        CheckedPolicy("mine", Planned(scheduled((0, 40), (1, 1)))).plan(view_of(ROWS, num_blocks=50, **limit))


@each("name", ["sarathi", "qoserve", "fcfs_classed"])
def test_baselines_of_the_laboratory_plan_what_can_be_done(name: str) -> None:
    entry = policy_entry(name)
    policy = CheckedPolicy(name, entry.make(entry.config()))
    assert policy.plan(view_of(ROWS, num_blocks=5)).scheduled


# aligned_slo where the bound of interference is set: how much documents prolong the gaps of chats.

Rows = dict[str, dict[str, Any]]

# An iteration of this chat alone takes 12 ms.
ANSWER: dict[str, Any] = {"prompt_len": 90, "num_generated": 10, "ttft_s": 9.0, "tpot_s": 9.0, "last_token_s": 0.99}
DOCUMENT: dict[str, Any] = {"be": True, "prompt_len": 90, "num_generated": 10}


def test_documents_have_their_share_whatever_the_bound_of_interference() -> None:
    """A twentieth of the time; each document's token takes 1.2 ms beside the answer's 12."""
    policy = make_policy("aligned_slo", {"interference": 1.0})
    view = view_of({"answer": ANSWER} | dict.fromkeys(("d0", "d1"), DOCUMENT | {"prompt_len": 10}), now=1.0)
    counts = [len(policy.plan(view).scheduled) - 1 for _ in range(1000)]
    documents_s = sum(counts) * (seconds_of(view, {"answer": 1, "d0": 1}) - seconds_of(view, {"answer": 1}))
    assert documents_s / (documents_s + 1000 * 0.012) == pytest.approx(0.05, rel=0.05)


@each("seed", range(40))
def test_as_many_documents_decode_as_the_bound_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bound = float(rng.choice([1.0, 1.05, 1.2, 1.5, 2.0]))
    chats = {f"c{number}": ANSWER | {"prompt_len": int(rng.integers(10, 300))} for number in range(rng.integers(1, 5))}
    lengths = rng.integers(10, 500, rng.integers(1, 9)).tolist()
    documents = {f"d{number}": DOCUMENT | {"prompt_len": length} for number, length in enumerate(lengths)}
    view = view_of(chats | documents, now=1.0)
    plan = make_policy("aligned_slo", {"interference": bound}).plan(view)
    alone_s, got = seconds_of(view, dict.fromkeys(chats, 1)), scheduled_of(view, plan)
    assert plan.alone_s == pytest.approx(alone_s)
    fitting = [
        count
        for count in range(len(lengths) + 1)
        if seconds_of(view, dict.fromkeys([*chats, *list(documents)[:count]], 1)) <= bound * alone_s + 1e-12
    ]
    assert list(got) == [*chats, *list(documents)[: max(fitting)]]


def test_a_prompt_of_a_document_is_cut_to_the_bound_and_prompts_of_chat_are_not() -> None:
    rows: Rows = {"answer": ANSWER | {"prompt_len": 98}, "document": {"be": True, "prompt_len": 500}}  # 12 ms alone
    bound: dict[str, Any] = {"interference": 1.505}
    assert decision_of("aligned_slo", rows, bound, now=1.0)[0] == {"answer": 1, "document": 6}
    rows["question"] = {"prompt_len": 88, "ttft_s": 9.0}
    assert decision_of("aligned_slo", rows, bound, now=1.0)[0] == {"answer": 1, "question": 88, "document": 50}


def test_the_first_token_of_a_chat_has_no_gap_to_prolong() -> None:
    rows: Rows = {"question": {"prompt_len": 20, "ttft_s": 4.0}, "document": DOCUMENT}
    assert decision_of("aligned_slo", rows, {"interference": 1.0}, now=1.0) == decision_of("aligned_slo", rows, now=1.0)


def test_iterations_of_documents_alone_stay_short_where_chat_comes_between_its_tokens() -> None:
    """On decode workers, for half a minute: twice as long as the last one of chats, 12 ms."""
    policy = make_policy("aligned_slo", {"interference": 1.5})

    def planned(rows: Rows, now: float) -> float:
        view = replace(view_of(rows, now=now), computes_prompts=False)
        return seconds_of(view, scheduled_of(view, policy.plan(view)))

    documents = {f"d{number}": DOCUMENT for number in range(20)}
    assert planned({"answer": ANSWER | {"tpot_s": 0.1}} | documents, 1.0) <= 1.5 * 0.012
    assert planned(documents, 30.0) <= 2 * 0.012
    assert planned(documents, 32.0) == pytest.approx(0.05)


# Turns of an encoder between iterations: as long as promises allow, and known to the policy.


class _Costs:
    def iteration_s(self, work: IterationWork) -> float:
        return 0.05

    def swap_s(self, num_tokens: float) -> float:
        return num_tokens


def chat(name: str, tpot_s: float | None) -> Request:
    return Request(RequestId(name), (1,), SamplingParams(max_tokens=9), "", 0.0, slo=Slo(tpot_s=tpot_s))


def test_a_turn_ends_in_time_for_the_tightest_promise() -> None:
    lengths = TurnLengths()
    for _ in range(50):
        lengths.ran(0.1)
    assert lengths.turn_s == pytest.approx(0.1)  # nobody was promised anything
    lengths.enter(chat("a", 0.2))
    lengths.enter(chat("none", None))
    assert lengths.turn_s == pytest.approx(0.08, abs=1e-4)
    lengths.enter(chat("b", 0.12))
    assert lengths.turn_s == pytest.approx(0.008, abs=1e-4)
    lengths.enter(chat("c", 0.05))
    assert lengths.turn_s == 0.0  # a step
    for name in "cb":
        lengths.leave(RequestId(name))
    assert lengths.turn_s == pytest.approx(0.08, abs=1e-4)
    assert TurnLengths().turn_s == LONGEST_TURN_S


def test_a_turn_is_told_once() -> None:
    lengths = TurnLengths()
    lengths.took(0.3)
    lengths.took(0.02)
    assert [lengths.before_iteration(), lengths.before_iteration()] == [0.02, 0.0]


def test_the_policy_reckons_with_turns_while_there_are_some() -> None:
    turns, costs = ExpectedTurns(), _Costs()
    turns.note(0.0)
    assert turns.beside(costs) is costs
    for _ in range(30):
        turns.note(0.02)
    assert turns.beside(costs).iteration_s(IterationWork()) == pytest.approx(0.07, abs=1e-4)
    assert turns.beside(costs).swap_s(3) == 3
    for _ in range(30):
        turns.note(0.0)
    assert turns.beside(costs) is costs


# The separate batches of `aligned`: the example of its page, and its parameters.


def members(batch: int, count: int) -> list[Candidate]:
    return [
        Candidate.of_handoff(handoff(request(f"b{batch}-{number}"), 1), BatchId(batch), 0.0) for number in range(count)
    ]


def order(num_in_second: int) -> BatchOrder:
    """Build an order: batch 1 of six runs on a worker of eight places and 100 blocks; batch 2 was granted."""
    config = BatchingConfig(policy="density_first")
    made = BatchOrder(batch_limits_of(DecodeWorkerConfig(max_running_requests=8), config, num_blocks=100).switch)
    made.granted(WaitingBatch(BatchId(1), True, 6, 0.0))
    made.choose(members(1, 6), 0, 0.0)
    made.granted(WaitingBatch(BatchId(2), True, num_in_second, 0.0))
    return made


@each(("num_running", "num_blocks", "enters"), [(6, 66, False), (5, 55, True), (5, 75, False)])
def test_the_example_of_its_page_the_next_batch_takes_over_when_what_runs_is_too_small(
    num_running: int, num_blocks: int, *, enters: bool
) -> None:
    made = order(4)
    assert bool(made.choose(members(2, 4), num_running, 0.5, num_blocks=num_blocks)) == enters
    assert made.is_switching == enters


def test_the_example_of_its_page_a_batch_of_three_joins() -> None:
    made = order(3)
    assert len(made.choose(members(2, 3), 5, 0.5, num_blocks=55)) == 3
    assert (made.running_id, made.is_switching) == (1, False)


def test_its_parameters_are_the_papers() -> None:
    config = policy_config("aligned")
    assert (config.min_requests, config.max_block_share) == (36, 0.4)
    assert config.pack_share == 0.95  # this one is not of the paper
    assert policy_entry("aligned").batching == "density_first"

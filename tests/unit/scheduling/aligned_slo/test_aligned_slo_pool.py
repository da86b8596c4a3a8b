"""aligned_slo beside a pool that takes decodes: who leaves to it, who waits for that, and who comes back."""

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationPlan, PoolView, WorkerView
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of

# Its next token is due in 90 ms.
_ANSWER: dict[str, Any] = {
    "prompt_len": 90,
    "num_generated": 10,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "first_token_s": 0.09,
    "last_token_s": 0.99,
}
_QUESTION: dict[str, Any] = {"prompt_len": 60, "ttft_s": 1.0, "tpot_s": 0.1, "arrival_s": 0.2}  # due in 200 ms
_DOCUMENT: dict[str, Any] = {"be": True, "prompt_len": 700, "num_generated": 3}  # 44 blocks
_AWAY: dict[str, Any] = _DOCUMENT | {"num_swapped": 702}


def pool_of(**changes: Any) -> PoolView:
    usual = PoolView(
        block_s=0.0005,
        begin_s=0.005,
        has_room=True,
        is_busy=False,
        leaving=(),
        num_coming=0,
        away={},
        num_returning=0,
    )
    return replace(usual, **changes)


def plan_of(view: WorkerView, pool: PoolView) -> IterationPlan:
    plan = make_policy("aligned_slo").plan(replace(view, pool=pool))
    assert_sound(view, plan)
    return plan


def left(view: WorkerView, plan: IterationPlan) -> list[str]:
    return [str(view.table.request_ids[row]) for row in plan.departures]


def full(**more: dict[str, Any]) -> WorkerView:
    """Return a worker whose memory an answer and a document fill, and a question that comes."""
    rows = {"answer": _ANSWER, "question": _QUESTION, "document": _DOCUMENT, **more}
    return view_of(rows, now=1.0, num_blocks=7 + 44, num_free_host=10_000, history=[0.02])


def test_a_document_leaves_to_the_pool_for_a_first_token_that_has_the_time() -> None:
    plan = plan_of(full(), pool_of())
    assert (left(full(), plan), evicted_of(full(), plan)) == (["document"], [])
    assert scheduled_of(full(), plan) == {"answer": 1}  # the question begins once its blocks are free


@pytest.mark.parametrize("pool", [pool_of(block_s=0.003), pool_of(has_room=False)], ids=["late", "full"])
def test_else_it_is_swapped_as_without_a_pool(pool: PoolView) -> None:
    plan = plan_of(full(), pool)
    assert (left(full(), plan), evicted_of(full(), plan)) == ([], [("document", "swap")])
    assert plan == make_policy("aligned_slo").plan(full())


def test_over_a_link_slower_than_computing_again_nothing_leaves() -> None:
    rows = {"document": _DOCUMENT, "late": _QUESTION | {"ttft_s": 0.1}}  # which would wait for it
    view = view_of(rows, now=1.0, num_blocks=44, history=[0.02])
    assert left(view, plan_of(view, pool_of(block_s=0.01))) == ["document"]
    assert left(view, plan_of(view, pool_of(block_s=0.02))) == []


def test_blocks_on_their_way_out_are_waited_for() -> None:
    plan = plan_of(full(), pool_of(num_coming=44, leaving=(RequestId("document"),)))
    assert (left(full(), plan), evicted_of(full(), plan), scheduled_of(full(), plan)) == ([], [], {"answer": 1})


def test_free_blocks_are_kept_for_one_that_waits_for_more() -> None:
    later = _QUESTION | {"ttft_s": 5.0, "prompt_len": 20}
    view = view_of(
        {"answer": _ANSWER, "question": _QUESTION, "document": _DOCUMENT, "later": later},
        now=1.0,
        num_blocks=7 + 44 + 3,  # the question needs four, and the answer's next ones
        history=[0.02],
    )
    plan = plan_of(view, pool_of())
    assert (left(view, plan), scheduled_of(view, plan)) == (["document"], {"answer": 1})


def test_before_growth_takes_the_last_blocks_the_worst_leaves() -> None:
    rows = {"answer": _ANSWER | {"num_generated": 7}, "document": _DOCUMENT | {"num_generated": 5}}
    view = view_of(rows, now=1.0, num_blocks=7 + 45, history=[0.02])
    plan = plan_of(view, pool_of(block_s=0.015))
    assert (left(view, plan), evicted_of(view, plan)) == (["document"], [])
    assert scheduled_of(view, plan)["answer"] == 1
    view = view_of(rows, now=1.0, num_blocks=100, history=[0.02])
    assert left(view, plan_of(view, pool_of(block_s=0.015))) == []


def test_what_is_away_comes_back_beside_the_iteration_and_takes_none_of_its_time() -> None:
    view = view_of({"answer": _ANSWER, "document": _AWAY}, now=1.0, num_blocks=100, history=[0.02])
    plan = plan_of(view, pool_of(away={RequestId("document"): False}))
    assert (plan.returns, scheduled_of(view, plan)) == ((view.table.row(RequestId("document")),), {"answer": 1})
    assert plan.work is not None
    assert plan.work.swap_in_tokens == 0
    on_its_way = pool_of(away={RequestId("document"): True}, num_returning=44)
    assert plan_of(view, on_its_way).returns == ()


@pytest.mark.parametrize(
    ("document", "has_room"),
    [
        (_DOCUMENT, False),
        (_DOCUMENT | {"prompt_len": 704, "num_generated": 0, "num_cached": 690, "num_blocks": 44}, True),
    ],
    ids=["the pool is full", "it is still read"],
)
def test_a_chat_that_is_away_displaces_a_document_that_cannot_leave(document: dict[str, Any], has_room: bool) -> None:
    rows = {"answer": _ANSWER | {"prompt_len": 30}, "chat": _ANSWER | {"num_swapped": 99}, "document": document}
    view = view_of(rows, now=1.0, num_blocks=3 + 44, history=[0.02])
    plan = plan_of(view, pool_of(away={RequestId("chat"): False}, has_room=has_room))
    assert [name for name, _ in evicted_of(view, plan)] == ["document"]
    assert plan.returns == (view.table.row(RequestId("chat")),)


def test_copies_back_are_ordered_two_iterations_ahead_at_most() -> None:
    rows = {"answer": _ANSWER, "one": _AWAY, "two": _AWAY}
    view = view_of(rows, now=1.0, num_blocks=200, history=[0.02])
    away = {RequestId("one"): False, RequestId("two"): False}
    assert len(plan_of(view, pool_of(away=away)).returns) == 1  # 22 ms each, by 20 ms
    assert len(plan_of(view, pool_of(away=away, block_s=0.0004)).returns) == 2


def test_a_worker_whose_requests_are_all_away_fetches_one() -> None:
    view = view_of({"document": _AWAY}, now=1.0, num_blocks=44)
    plan = plan_of(view, pool_of(away={RequestId("document"): False}))
    assert (len(plan.returns), plan.scheduled) == (1, ())

"""aligned_slo beside a pool that takes decodes: who leaves to it, who waits for that, and who comes back."""

from dataclasses import replace
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import PoolView
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of
from tests.support.marks import each

Rows = dict[str, dict[str, Any]]

# Each holds seven blocks. The next token of the answer is due in 90 ms.
ANSWER: dict[str, Any] = {"prompt_len": 90, "num_generated": 10, "ttft_s": 1.0, "tpot_s": 0.1, "first_token_s": 0.09}
DOCUMENT: dict[str, Any] = {"prompt_len": 90, "num_generated": 10, "be": True}
QUESTION: dict[str, Any] = {"prompt_len": 60, "ttft_s": 0.4, "arrival_s": 0.9}
CROWD: Rows = {"answer": ANSWER, "d0": DOCUMENT, "d1": DOCUMENT, "d2": DOCUMENT}


def pool_of(**changes: Any) -> PoolView:
    usual = PoolView(block_s=0.0005, has_room=True, is_busy=False, leaving=(), num_coming=0, away={}, num_returning=0)
    return replace(usual, **changes)


def beside_pool(rows: Rows, pool: PoolView, **worker: Any) -> tuple[dict[str, int], list[str], list[str], list[str]]:
    """Return what is scheduled, who leaves to the pool, who is evicted, and who comes back from the pool."""
    view = replace(view_of(rows, now=1.0, **worker), pool=pool)
    plan = make_policy("aligned_slo").plan(view)
    assert_sound(view, plan)
    leaving, back = ([str(view.table.request_ids[row]) for row in rows] for rows in (plan.departures, plan.returns))
    return scheduled_of(view, plan), leaving, [name for name, _ in evicted_of(view, plan)], back


def test_a_document_leaves_to_the_pool_and_the_chat_waits_for_its_blocks() -> None:
    got, leaving, evicted, _ = beside_pool(CROWD | {"question": QUESTION}, pool_of(), num_blocks=28)
    assert (leaving, evicted) == (["d2"], [])
    assert "question" not in got
    on_the_way = pool_of(num_coming=7, leaving=(RequestId("d2"),), is_busy=True)
    got, leaving, evicted, _ = beside_pool(CROWD | {"question": QUESTION}, on_the_way, num_blocks=28)
    assert (leaving, evicted) == ([], [])
    assert not {"question", "d2"} & set(got)


@each("pool", [pool_of(has_room=False), pool_of(block_s=0.02)])
def test_a_document_for_which_the_pool_is_full_or_slow_is_evicted(pool: PoolView) -> None:
    got, leaving, evicted, _ = beside_pool(CROWD | {"question": QUESTION}, pool, num_blocks=28)
    assert (got["question"], leaving, evicted) == (60, [], ["d2"])


def test_what_is_away_comes_back_beside_the_iteration_and_takes_none_of_its_time() -> None:
    rows: Rows = {"answer": ANSWER, "away": DOCUMENT | {"num_swapped": 99}}
    away = pool_of(away={RequestId("away"): False})
    assert beside_pool(rows, away) == ({"answer": 1}, [], [], ["away"])
    assert beside_pool(rows, pool_of(away={RequestId("away"): True}, num_returning=7)) == ({"answer": 1}, [], [], [])


def test_a_chat_that_is_away_displaces_a_document() -> None:
    rows = CROWD | {"chat": ANSWER | {"num_swapped": 99}}
    pool = pool_of(away={RequestId("chat"): False}, has_room=False)
    assert beside_pool(rows, pool, num_blocks=29)[2:] == (["d2"], ["chat"])


def test_a_worker_whose_requests_are_all_away_fetches_one() -> None:
    away = {RequestId(name): False for name in ("d0", "d1")}
    rows: Rows = {str(name): DOCUMENT | {"num_swapped": 99} for name in away}
    got, _, _, back = beside_pool(rows, pool_of(away=away), num_blocks=7)
    assert (got, back) == ({}, ["d0"])


def test_a_request_that_is_here_alone_and_away_is_fetched() -> None:
    away = pool_of(away={RequestId("d0"): False})
    assert beside_pool({"d0": DOCUMENT | {"num_swapped": 99}}, away, num_blocks=20)[3] == ["d0"]


def test_no_cache_is_dropped_beside_departures_alone() -> None:
    """The question takes ten blocks: those of a decode, which leaves, and of a prompt, which would be dropped."""
    begun = {"prompt_len": 200, "num_cached": 99, "be": True, "arrival_s": 0.2}
    rows: Rows = {"first": {"prompt_len": 300, "be": True}, "begun": begun, "decode": DOCUMENT | {"arrival_s": 0.3}}
    beside_pool(rows | {"question": QUESTION | {"prompt_len": 150}}, pool_of(), num_blocks=14)

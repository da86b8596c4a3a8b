"""aligned_slo where best-effort work shares the memory with objectives: what is copied, dropped, let in, and paused."""

from typing import Any

import pytest

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import WorkerView
from tests.harnesses.scheduling import assert_sound, decision_of, evicted_of, scheduled_of, view_of

# Its next token is due in 90 ms: an iteration may take 81. It takes 12 ms, and has nothing ahead of its schedule.
_ANSWER = {
    "prompt_len": 90,
    "num_generated": 10,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "first_token_s": 0.09,
    "last_token_s": 0.99,
}
_QUESTION = {"prompt_len": 60, "ttft_s": 1.0, "tpot_s": 0.1, "arrival_s": 0.2}


def _evicted_for_question(document_len: int) -> list[tuple[str, str]]:
    rows: dict[str, dict[str, Any]] = {
        "answer": _ANSWER,
        "question": _QUESTION,
        "document": {"be": True, "prompt_len": document_len, "num_generated": 3},
    }
    num_blocks = 7 + -(-(document_len + 3) // 16)
    return decision_of("aligned_slo", rows, now=1.0, num_blocks=num_blocks, num_free_host=10_000)[1]


def test_a_cache_is_copied_out_within_the_time_of_an_iteration_and_else_dropped() -> None:
    assert _evicted_for_question(700) == [("document", "swap")]  # 70 ms
    assert _evicted_for_question(900) == [("document", "drop")]  # 90 ms


def _is_back(num_swapped: int, **beside: dict[str, Any]) -> bool:
    document = {"be": True, "prompt_len": num_swapped - 3, "num_generated": 4, "num_swapped": num_swapped}
    return "document" in decision_of("aligned_slo", {**beside, "document": document}, now=1.0)[0]


def test_a_cache_comes_back_within_the_time_of_an_iteration() -> None:
    assert _is_back(700, answer=_ANSWER)
    assert not _is_back(900, answer=_ANSWER)
    assert _is_back(900)


def _with_answers(count: int, now: float) -> WorkerView:
    """Return a worker of 40 blocks with answers that hold 7 each, and a document that takes 19."""
    answer = _ANSWER | {"first_token_s": now - 0.91, "last_token_s": now - 0.01, "arrival_s": now - 1.0}
    answers = {f"answer{number}": answer for number in range(count)}
    document: dict[str, Any] = {"be": True, "prompt_len": 300, "arrival_s": now - 1.0}
    return view_of({**answers, "document": document}, now=now, num_blocks=40)


def test_blocks_that_requests_on_time_held_lately_are_kept_from_best_effort_prompts() -> None:
    policy = make_policy("aligned_slo")

    def comes_in(count: int, now: float) -> bool:
        view = _with_answers(count, now)
        return "document" in scheduled_of(view, policy.plan(view))

    assert comes_in(2, 1.0)
    assert not comes_in(4, 2.0)
    assert not comes_in(2, 3.0)  # 26 blocks are free, and 14 more were held
    assert comes_in(2, 33.0)  # that is over


def test_who_is_late_takes_the_time_that_prompts_in_time_leave() -> None:
    late = _ANSWER | {"ttft_s": 0.05}
    rows = {"answer": _ANSWER, "question": _QUESTION | {"prompt_len": 150}, "late": late}
    view = view_of(rows, now=1.0, history=[0.02])
    assert scheduled_of(view, make_policy("aligned_slo").plan(view)) == {"answer": 1, "question": 69}
    view = view_of({"answer": _ANSWER, "late": late}, now=1.0, history=[0.02])
    assert scheduled_of(view, make_policy("aligned_slo").plan(view)) == {"answer": 1, "late": 1}


@pytest.mark.parametrize(
    ("waited_s", "num_of_chat", "does_short_one_begin"), [(700.0, 1, False), (500.0, 1, True), (700.0, 3, True)]
)
def test_without_a_floor_other_documents_leave_blocks_to_one_that_has_waited_for_too_long(
    waited_s: float, num_of_chat: int, *, does_short_one_begin: bool
) -> None:
    """It needs 25 of 40 blocks, and documents hold eight: with seven of chat these will do, with 21 they would not."""
    rows: dict[str, dict[str, Any]] = {f"answer{number}": _ANSWER for number in range(num_of_chat)}
    rows |= {
        f"written{number}": {"be": True, "prompt_len": 60, "num_generated": 3, "arrival_s": -200.0}
        for number in range(2)
    }
    rows["forgotten"] = {"be": True, "prompt_len": 400, "arrival_s": 1.0 - waited_s}
    rows["short"] = {"be": True, "prompt_len": 10, "arrival_s": 0.9}
    view = view_of(rows, now=1.0, num_blocks=40, max_tokens=2000)
    plan = make_policy("aligned_slo", {"best_effort_floor": 0.0}).plan(view)
    assert_sound(view, plan)
    assert not plan.evictions
    assert ("short" in scheduled_of(view, plan)) == does_short_one_begin


def test_without_chat_a_large_document_that_has_waited_for_too_long_begins() -> None:
    """No chat is there to go before, so nothing has to be owed."""
    written = {"be": True, "prompt_len": 60, "num_generated": 3, "arrival_s": -20.0, "predicted_len": 8}
    rows: dict[str, dict[str, Any]] = {f"written{number}": written for number in range(4)}
    rows["large"] = {"be": True, "prompt_len": 400, "arrival_s": -99.0}
    view = view_of(rows, now=1.0, num_blocks=40, max_tokens=2000)
    assert scheduled_of(view, make_policy("aligned_slo").plan(view)).get("large") == 400


_AHEAD = {"prompt_len": 48, "num_generated": 32, "ttft_s": 1.0, "tpot_s": 1.0, "last_token_s": 9.9}
_BEHIND = _AHEAD | {"num_generated": 16}
_URGENT = {"prompt_len": 64, "ttft_s": 1.0, "tpot_s": 1.0, "arrival_s": 9.4}


def _decided(*, num_free_host: int = 200, **rows: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    view = view_of(rows, now=10.0, num_blocks=9, num_free_host=num_free_host)
    plan = make_policy("aligned_slo").plan(view)
    return scheduled_of(view, plan), evicted_of(view, plan)


def test_the_one_furthest_ahead_gives_way_to_an_urgent_prompt() -> None:
    """32 tokens were due by 32 s, and 16 by 16 s: the former could be without its cache for longer."""
    scheduled, evicted = _decided(far=_AHEAD, near=_BEHIND, new=_URGENT)
    assert evicted == [("far", "swap")]
    assert scheduled == {"near": 1, "new": 64}


def test_a_cache_that_would_be_dropped_is_not_lent() -> None:
    """The host has room for the 79 tokens of the one furthest ahead, for the 63 of the other, or for neither."""
    for num_free_host, who in ((79, ["far"]), (78, ["near"]), (62, []), (0, [])):
        scheduled, evicted = _decided(far=_AHEAD, near=_BEHIND, new=_URGENT, num_free_host=num_free_host)
        assert evicted == [(one, "swap") for one in who]
        assert ("new" in scheduled) is bool(who)


def test_documents_are_not_evicted_for_a_prompt_that_would_need_a_loan_as_well() -> None:
    """Three blocks are free, and with the document's four: it takes five, and the host may have no room for a loan."""
    document = {"prompt_len": 16, "num_generated": 1, "be": True}
    rows: dict[str, dict[str, Any]] = {"far": _AHEAD, "document": document, "new": _URGENT | {"prompt_len": 80}}
    assert _decided(**rows, num_free_host=0) == ({"far": 1, "document": 1}, [])
    assert _decided(**rows, num_free_host=200)[0]["new"] == 80


def test_no_request_gives_way_to_a_prompt_that_has_time() -> None:
    scheduled, evicted = _decided(far=_AHEAD, near=_BEHIND, new=_URGENT | {"arrival_s": 9.99})
    assert evicted == []
    assert scheduled == {"near": 1, "far": 1}


def test_a_request_not_ahead_keeps_its_cache() -> None:
    """Ten seconds for its 32 tokens, as a third of a second for each allows."""
    scheduled, evicted = _decided(late=_AHEAD | {"tpot_s": 1 / 3}, near=_BEHIND | {"tpot_s": 0.65}, new=_URGENT)
    assert evicted == []
    assert "new" not in scheduled


def test_who_has_lent_its_memory_does_not_take_it_back_before_it_is_due() -> None:
    lent = _AHEAD | {"num_cached": 0, "num_blocks": 0}
    scheduled, evicted = _decided(near=_BEHIND, other=_BEHIND, lent=lent)
    assert evicted == []
    assert scheduled == {"near": 1, "other": 1}


def test_it_is_due_again_a_minute_after_its_last_token() -> None:
    """By the mean gap it would have 22 s more: nobody waits so long in the middle of an answer."""
    lent = _AHEAD | {"num_cached": 0, "num_blocks": 0, "last_token_s": -49.99}
    scheduled, evicted = _decided(near=_BEHIND, other=_BEHIND, lent=lent)
    assert len(evicted) == 1
    assert "lent" in scheduled


def test_who_has_paused_for_nearly_as_long_lends_nothing() -> None:
    paused = _AHEAD | {"last_token_s": -49.5}
    scheduled, evicted = _decided(far=paused, near=_BEHIND | {"tpot_s": 0.65}, new=_URGENT)
    assert evicted == []
    assert "new" not in scheduled


def test_loans_stop_once_they_would_fill_the_device() -> None:
    """Nine blocks hold 144 tokens; each that has lent comes back with 81. In an overload all memory went round."""
    lent = _AHEAD | {"num_cached": 0, "num_blocks": 0}
    assert _decided(far=_AHEAD, near=_BEHIND, lent=lent, new=_URGENT)[1] == [("far", "swap")]
    scheduled, evicted = _decided(far=_AHEAD, near=_BEHIND, lent=lent, another=lent, new=_URGENT)
    assert evicted == []
    assert scheduled == {"near": 1, "far": 1}


def test_loans_take_a_share_of_the_time_or_what_was_left_of_it() -> None:
    """79 tokens are copied there and back in 15.8 ms. Of 30 ms 14.2 are left then, and a twentieth of 0.04 s is 2."""
    policy = make_policy("aligned_slo", {"loan_credit_s": 0.03, "loan_share": 0.05})
    rows = {"far": _AHEAD, "near": _BEHIND | {"tpot_s": 0.65}, "new": _URGENT}
    for now, lends in ((10.0, True), (10.0, False), (10.03, False), (10.04, True), (10.05, False)):
        view = view_of(rows, now=now, num_blocks=9, num_free_host=79)
        assert bool(policy.plan(view).evictions) is lends


def test_none_begins_while_an_answer_has_been_silent_for_longer_than_it_may_be() -> None:
    silent = _AHEAD | {"num_cached": 0, "num_blocks": 0, "last_token_s": -1.0}
    for silence_s, begins in ((10.0, False), (12.0, True)):
        view = view_of({"near": _BEHIND, "silent": silent, "new": _URGENT}, now=10.0, num_blocks=9)
        plan = make_policy("aligned_slo", {"silence_s": silence_s}).plan(view)
        assert ("new" in scheduled_of(view, plan)) is begins

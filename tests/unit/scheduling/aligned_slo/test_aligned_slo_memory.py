"""aligned_slo where best-effort work shares the memory with objectives: what is copied, dropped, let in, and paused."""

from typing import Any

import pytest

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import WorkerView
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of

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
    view = view_of(rows, now=1.0, num_blocks=num_blocks, num_free_host=10_000)
    plan = make_policy("aligned_slo").plan(view)
    assert_sound(view, plan)
    return evicted_of(view, plan)


def test_a_cache_is_copied_out_within_the_time_of_an_iteration_and_else_dropped() -> None:
    assert _evicted_for_question(700) == [("document", "swap")]  # 70 ms
    assert _evicted_for_question(900) == [("document", "drop")]  # 90 ms


def _is_back(num_swapped: int, **beside: dict[str, Any]) -> bool:
    document = {"be": True, "prompt_len": num_swapped - 3, "num_generated": 4, "num_swapped": num_swapped}
    view = view_of({**beside, "document": document}, now=1.0)
    plan = make_policy("aligned_slo").plan(view)
    assert_sound(view, plan)
    return "document" in scheduled_of(view, plan)


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

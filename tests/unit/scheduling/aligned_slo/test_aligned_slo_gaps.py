"""aligned_slo where a prompt takes longer than one gap between tokens: what counts is the mean of a request's gaps."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.aligned_slo.policy import PromptReserve
from alignedserve.scheduling.runtime_estimate import measure_prefill_times
from tests.harnesses.scheduling import EasyCosts, assert_sound, decision_of, scheduled_of, table_of, view_of
from tests.support.marks import each

# Its next token is due in 90 ms, and by the mean of its gaps in 300 ms. It takes 12 ms.
_AHEAD = {
    "prompt_len": 90,
    "num_generated": 10,
    "ttft_s": 0.4,
    "tpot_s": 0.1,
    "first_token_s": 0.3,
    "last_token_s": 0.99,
}


def _tokens_of_question(answer: dict[str, Any], due_in_s: float, history: Sequence[float] = (), **view_as: Any) -> int:
    """Return tokens of 120, which take 132 ms with the answer's next token."""
    question = {"prompt_len": 120, "ttft_s": 0.4, "arrival_s": 0.6 + due_in_s}
    return decision_of("aligned_slo", {"answer": answer, "question": question}, now=1.0, history=history, **view_as)[0][
        "question"
    ]


def test_a_prompt_is_cut_where_that_leaves_it_in_time() -> None:
    assert _tokens_of_question(_AHEAD, due_in_s=0.2) == 69


def test_gaps_are_planned_shorter_where_iterations_take_longer_than_predicted() -> None:
    """81 ms of the 90, as long as errors are usual ones; half as much where they take twice 1.05 times as long."""
    assert _tokens_of_question(_AHEAD, due_in_s=0.2, stretch=1.05) == 69
    assert _tokens_of_question(_AHEAD, due_in_s=0.2, stretch=2.1) == 28


def test_a_prompt_that_would_be_late_in_parts_is_computed_in_one() -> None:
    assert _tokens_of_question(_AHEAD, due_in_s=0.14) == 120


def test_a_gap_is_lengthened_of_who_can_make_up_for_it_and_of_no_other() -> None:
    """On its schedule to the token; a twentieth of 0.1 s comes back with each later token, half of which count."""
    on_schedule = _AHEAD | {"first_token_s": 0.09}
    assert _tokens_of_question(on_schedule | {"max_tokens": 30}, due_in_s=0.14) == 120
    assert _tokens_of_question(on_schedule | {"max_tokens": 12}, due_in_s=0.14) == 69


def test_no_gap_is_lengthened_where_later_ones_have_given_nothing_back_of_late() -> None:
    on_schedule = _AHEAD | {"first_token_s": 0.09, "max_tokens": 30}
    assert _tokens_of_question(on_schedule, due_in_s=0.14, history=[0.09]) == 120
    assert _tokens_of_question(on_schedule, due_in_s=0.14, history=[0.096]) == 69
    assert _tokens_of_question(_AHEAD, due_in_s=0.14, history=[0.096]) == 120  # what it is ahead already is its own


def test_what_prompts_take_is_not_overrated() -> None:
    """0.145 s by the line through the origin that ALISE has for it, 0.130 s as it is: not late yet."""
    assert _tokens_of_question(_AHEAD, due_in_s=0.135) == 120


def test_no_prompt_makes_an_iteration_so_long_that_who_comes_meanwhile_would_be_late() -> None:
    """0.8 of the tightest objective: who comes as it begins has the longest usual iteration left, a fifth of it."""
    rows = {"answer": _AHEAD | {"ttft_s": 1.0}, "question": {"prompt_len": 120, "ttft_s": 0.16, "arrival_s": 0.98}}
    view = view_of(rows, now=1.0)
    assert scheduled_of(view, make_policy("aligned_slo").plan(view))["question"] == 69
    rows["question"] |= {"ttft_s": 0.18, "arrival_s": 0.96}
    view = view_of(rows, now=1.0)
    assert scheduled_of(view, make_policy("aligned_slo").plan(view))["question"] == 120


def test_a_prompt_of_several_iterations_takes_the_time_that_others_are_ahead() -> None:
    """It takes 610 ms and the answer 12 ms with each part; 0.9 of the 300 ms that the answer is ahead are its own."""

    def tokens(first_token_s: float, due_in_s: float) -> int:
        answer = _AHEAD | {"first_token_s": first_token_s, "ttft_s": 1.0}
        question = {"prompt_len": 600, "ttft_s": 1.0, "arrival_s": due_in_s}
        return decision_of("aligned_slo", {"answer": answer, "question": question}, now=1.0, history=[0.2])[0][
            "question"
        ]

    assert tokens(0.3, due_in_s=0.75) == 69  # nine parts are in time
    assert tokens(0.3, due_in_s=0.65) == 258  # three are, nine would be late
    assert tokens(0.3, due_in_s=0.63) == 69  # even three are late
    assert tokens(0.09, due_in_s=0.65) == 69  # the answer is not ahead


def test_parts_count_on_what_later_gaps_give_back_for_one_prompt_at_a_time() -> None:
    """The answer is not ahead of its schedule, but 190 later tokens give 5 ms back each, of which half count."""

    def tokens(*others: str) -> int:
        answer = _AHEAD | {"first_token_s": 0.09, "ttft_s": 1.0, "max_tokens": 200}
        question = {"prompt_len": 600, "ttft_s": 1.0, "arrival_s": 0.65}
        rows = {"answer": answer, "question": question} | dict.fromkeys(others, question | {"prompt_len": 630})
        return decision_of("aligned_slo", rows, now=1.0, history=[0.08])[0]["question"]

    assert tokens() > 300
    assert tokens("another") == 69


# Its next token is due in 90 ms, of which an iteration may take 81. Alone it takes 12 ms.
_ANSWER = {"prompt_len": 90, "num_generated": 10, "ttft_s": 1.0, "tpot_s": 0.1, "last_token_s": 0.99}
_DOCUMENT = {"prompt_len": 90, "num_generated": 10, "be": True}  # 2 ms
# 400 ms, of 500. In parts of 69 ms beside the answer it takes 470.
_QUESTION: dict[str, Any] = {"prompt_len": 390, "ttft_s": 0.5, "tpot_s": 0.1}


def _num_documents(
    *,
    ahead_s: float,
    ttft_s: float = 0.5,
    num_waiting: int = 0,
    documents_as: dict[str, Any] | None = None,
    **params: float,
) -> int:
    """Return how many of fifty documents decode beside an answer that is so far ahead, where questions come."""
    policy = make_policy("aligned_slo", params)
    policy.plan(view_of({"question": _QUESTION | {"ttft_s": ttft_s}}))
    rows = {f"document-{number}": _DOCUMENT | (documents_as or {}) for number in range(50)}
    has_no_room = _ANSWER | {"prompt_len": 20_000, "num_cached": 0, "first_token_s": 0.0}
    rows |= {f"waiting-{number}": has_no_room for number in range(num_waiting)}
    answer = _ANSWER | {"first_token_s": ahead_s}  # due by ten mean gaps of 0.1 s, at 1 s
    view = view_of({"answer": answer, **rows}, now=1.0)
    plan = policy.plan(view)
    assert_sound(view, plan)
    scheduled = scheduled_of(view, plan)
    assert "answer" in scheduled
    return sum(name.startswith("document") for name in scheduled)


def test_documents_fill_gaps_of_chats_that_are_ahead_by_a_prompt() -> None:
    assert _num_documents(ahead_s=0.49) == _num_documents(ahead_s=0.9) == 34


def test_documents_leave_chats_ahead_by_a_prompt() -> None:
    """For 41 ms, of which the answer takes 12."""
    assert _num_documents(ahead_s=0.441) == 14


def test_documents_have_a_tenth_of_the_time_beside_chats_that_are_not_ahead() -> None:
    """Documents share 69 ms here: a tenth of it holds three, and all of it, without the reserve, 34."""
    assert _num_documents(ahead_s=0.1) == 3
    assert _num_documents(ahead_s=0.1, documents_share=1.0) == 34


def test_nothing_is_kept_for_prompts_that_are_in_time_in_parts() -> None:
    assert _num_documents(ahead_s=0.1, ttft_s=0.7) == 34
    assert _num_documents(ahead_s=0.1, ttft_s=0.7, num_waiting=1) == 34
    assert _num_documents(ahead_s=0.1, ttft_s=0.7, num_waiting=2) == 3


def test_documents_whose_deadline_presses_wait_for_no_reserve() -> None:
    pressing = {"deadline_s": 1.4, "max_tokens": 20}
    assert _num_documents(ahead_s=0.1, documents_as=pressing) > 20


@each(("longest_s", "until_s"), [(1.0, 0.2), (0.25, 0.35)])
def test_the_reserve_is_of_what_nine_of_ten_prompts_take_and_can_be_in_time(longest_s: float, until_s: float) -> None:
    reserve = PromptReserve(share=0.1)
    lengths = [390] * 9 + [4000]
    table = table_of({str(number): _QUESTION | {"prompt_len": length} for number, length in enumerate(lengths)}, 16)
    reserve.note(table, measure_prefill_times(EasyCosts()))
    reserve.note(table, measure_prefill_times(EasyCosts()))  # known already
    found_s = reserve.until_s(0.6, alone_s=0.1, budget_s=0.9, longest_s=longest_s, stretch=3.0)
    assert found_s == pytest.approx(until_s, abs=0.01)


def test_only_prompts_of_chat_that_have_come_count() -> None:
    reserve = PromptReserve(share=0.0)
    rows: dict[str, dict[str, Any]] = {
        "document": {"prompt_len": 4000, "be": True},
        "patient": {"prompt_len": 4000, "tpot_s": 0.1},
        "moved": _QUESTION | {"prompt_len": 4000, "num_generated": 3, "first_token_s": 0.0, "last_token_s": 0.1},
    }
    reserve.note(table_of(rows, 16), measure_prefill_times(EasyCosts()))
    assert reserve.until_s(0.5, alone_s=0.1, budget_s=0.9, longest_s=1.0, stretch=4.0) == 0.9


def test_nothing_is_reserved_before_any_prompt_is_known() -> None:
    """Whatever two chats that wait would take for a prompt in parts."""
    assert PromptReserve(0.1).until_s(0.0, alone_s=0.1, budget_s=0.9, longest_s=1.0, stretch=math.inf) == 0.9

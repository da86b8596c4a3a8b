"""aligned_slo: what a user would notice, one promise a test. Costs: 10 ms an iteration and 1 ms a token (EasyCosts)."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationHistory
from tests.harnesses.scheduling import (
    EasyCosts,
    assert_sound,
    decision_of,
    scheduled_of,
    seconds_of,
    view_of,
)
from tests.support.marks import each

Rows = dict[str, dict[str, Any]]


def chat(prompt_len: int, ttft_s: float, **fields: Any) -> dict[str, Any]:
    return {"prompt_len": prompt_len, "ttft_s": ttft_s, **fields}


def document(prompt_len: int, **fields: Any) -> dict[str, Any]:
    return {"prompt_len": prompt_len, "be": True, **fields}


# Ten tokens are out; the next is due in 90 ms, and an iteration of it alone takes 12 ms.
ANSWER: dict[str, Any] = chat(90, 1.0, num_generated=10, tpot_s=0.1, first_token_s=0.09, last_token_s=0.99)
QUESTION: dict[str, Any] = chat(60, 0.4, arrival_s=0.9)
LATE_ANSWER: dict[str, Any] = ANSWER | {"ttft_s": 0.05}
DOCUMENT: dict[str, Any] = document(90, num_generated=10)
PROMPT: dict[str, Any] = document(500)


def decided(
    rows: Rows, params: dict[str, Any] | None = None, *, now: float = 1.0, **worker: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    return decision_of("aligned_slo", rows, params, now=now, **worker)


def scheduled(rows: Rows, **worker: Any) -> dict[str, int]:
    return decided(rows, **worker)[0]


# --- order


def test_chats_go_before_documents() -> None:
    """Also late ones, and before documents whose deadline presses; these go before documents that can wait."""
    rows: Rows = {
        "idle": document(10),
        "pressed": document(10, predicted_len=1, deadline_s=1.05),
        "late": chat(20, 0.5, arrival_s=0.3),
        "in time": chat(30, 5.0, arrival_s=0.9),
    }
    assert list(scheduled(rows)) == ["in time", "late", "pressed", "idle"]


@each(("deadline_s", "first"), [(1.4, "pressed"), (2.1, "pressed"), (2.4, "idle"), (1.2, "idle")])
def test_a_deadline_presses_when_a_quarter_of_what_is_left_is_needed(deadline_s: float, first: str) -> None:
    """The document takes 0.31 s: of 0.4, 1.1 or 1.4 s. With 0.2 s left it is late anyway."""
    idle = document(300, predicted_len=1)
    rows: Rows = {"idle": idle, "pressed": idle | {"deadline_s": deadline_s}}
    assert next(iter(scheduled(rows))) == first


@each(
    ("fields", "is_first"),
    [
        ({"ttft_s": 5.5}, False),
        ({"ttft_s": 4.5}, True),
        ({"ttft_s": 5.1, "prompt_len": 20}, True),
        ({"ttft_s": 5.1, "prompt_len": 150}, False),
        ({"ttft_s": 9.0, "priority": -1}, True),
        ({"ttft_s": 0.1, "prompt_len": 10}, False),
    ],
    ids=["due later", "due first", "short", "not short", "important", "late"],
)
def test_prompts_of_chat_go_by_priority_and_by_when_they_are_due_and_short_ones_overtake(
    fields: dict[str, Any], is_first: bool
) -> None:
    rows: Rows = {"prompt": chat(100, 5.0), "other": {"prompt_len": 100, **fields}}
    assert (next(iter(scheduled(rows))) == "other") is is_first


def test_late_chats_and_chats_without_objectives_go_by_length() -> None:
    short = {"prompt_len": 20, "predicted_len": 900, "arrival_s": 0.5}
    rows: Rows = {"long": {"prompt_len": 200}, "short": short, "late": chat(90, 0.2)}
    assert list(scheduled(rows)) == ["short", "late", "long"]


def test_documents_go_by_priority_then_those_that_hold_memory_then_as_they_came() -> None:
    rows: Rows = {"first": document(50), "second": document(20, arrival_s=0.1)}
    rows |= {"begun": document(50, num_cached=20, arrival_s=0.2), "important": document(50, priority=-1, arrival_s=0.3)}
    assert list(scheduled(rows)) == ["important", "begun", "first", "second"]


# --- who gives way where not all can be in time: tests/property/scheduling/test_aligned_slo_relegation.py


def test_the_longest_waits_where_two_others_can_be_in_time() -> None:
    """It is due first: computed first, both others would be late, and beside them as well."""
    rows: Rows = {"long": chat(200, 0.25), "first": chat(190, 0.45), "second": chat(190, 0.47)}
    assert list(scheduled(rows, now=0.0)) == ["first", "second"]
    assert next(iter(scheduled({**rows, "second": rows["second"] | {"ttft_s": 0.9}}, now=0.0))) == "long"
    assert next(iter(scheduled({**rows, "long": rows["long"] | {"priority": -1}}, now=0.0))) == "long"


# --- how long an iteration may be


def tokens_of_question(answer: dict[str, Any], params: dict[str, Any] | None = None, **question: Any) -> int:
    """Return how many of 2 000, due in 2.3 s, are computed beside the answer: with its token 12 ms and these."""
    rows = {"answer": answer, "question": {"prompt_len": 2000, "ttft_s": 3.3, **question}}
    return decided(rows, params, max_tokens=4096)[0]["question"]


@each(("first_token_s", "num_tokens"), [(0.09, 78), (0.3, 258), (0.9, 798), (0.0, 78)])
def test_a_prompt_uses_what_chats_are_ahead_of_their_mean_gap(first_token_s: float, num_tokens: int) -> None:
    """0.9 of 100, 300 or 900 ms, 12 of them the answer's. One that is behind already has a usual gap."""
    answer = ANSWER | {"first_token_s": first_token_s}
    assert num_tokens - 1 <= tokens_of_question(answer) <= num_tokens


def test_no_prompt_makes_a_gap_above_the_longest() -> None:
    answer = ANSWER | {"first_token_s": 0.9, "tpot_s": 0.5}  # ahead by 4.9 s
    assert tokens_of_question(answer) == 888
    assert tokens_of_question(answer, {"longest_gap_s": 0.6}) == 528
    assert tokens_of_question(answer | {"tpot_s": 2.0}, {"longest_gap_s": 0.6}) == 1788  # its own gaps are longer


@each(("stretch", "num_tokens"), [(1.05, 798), (2.1, 393)])
def test_gaps_are_planned_shorter_where_iterations_take_longer_than_predicted(stretch: float, num_tokens: int) -> None:
    rows: Rows = {"answer": ANSWER | {"first_token_s": 0.9}, "question": {"prompt_len": 2000, "ttft_s": 3.3}}
    assert num_tokens - 1 <= decided(rows, max_tokens=4096, stretch=stretch)[0]["question"] <= num_tokens


@each("ttft_s", [0.9, 2.9, 9.0, None], ids=["late", "late when it ends", "with time", "without an objective"])
def test_other_chats_use_a_usual_gap_alone(ttft_s: float | None) -> None:
    """The answer is ahead by 0.9 s; these have 0.9 of a mean gap of 0.1 s."""
    assert tokens_of_question(ANSWER | {"first_token_s": 0.9}, ttft_s=ttft_s) == 78


def test_an_objective_shorter_than_the_decodes_holds_none_back() -> None:
    rows: Rows = {"hasty": ANSWER | {"tpot_s": 0.001}, "answer": ANSWER, "slow": ANSWER | {"tpot_s": 9.0}}
    assert set(scheduled(rows)) == set(rows)


def with_documents(answer: dict[str, Any], count: int = 50) -> Rows:
    return {"answer": answer} | {f"document-{number}": DOCUMENT for number in range(count)}


@each(("first_token_s", "num_documents"), [(0.09, 0), (0.75, 0), (0.85, 16), (0.9, 39)])
def test_documents_leave_chats_ahead_by_two_usual_prompts(first_token_s: float, num_documents: int) -> None:
    """A usual prompt takes 0.4 s. Each document takes 2 ms."""
    policy = make_policy("aligned_slo")
    policy.plan(view_of({f"{number}": chat(390, 5.0) for number in range(200)}, max_tokens=99))
    view = view_of(with_documents(ANSWER | {"first_token_s": first_token_s}), now=1.0)
    plan = policy.plan(view)
    assert_sound(view, plan)
    assert abs(len(plan.scheduled) - 1 - num_documents) <= 1


@each(("wait_s", "num_documents"), [(0.05, 26), (0.95, 0)])
def test_documents_leave_nothing_where_first_tokens_came_early(wait_s: float, num_documents: int) -> None:
    policy = make_policy("aligned_slo")
    policy.plan(view_of({f"{number}": chat(390, 5.0) for number in range(200)}, max_tokens=99))
    begun = ANSWER | {"arrival_s": 0.95 - wait_s, "first_token_s": 0.95}
    policy.plan(view_of({f"{number}": begun for number in range(60)}, now=0.96))
    plan = policy.plan(view_of(with_documents(ANSWER), now=1.0))
    assert abs(len(plan.scheduled) - 1 - num_documents) <= 1


@each(
    ("now", "ttft_s", "longest_s"),
    [(1.0, 0.5, 0.1), (20.0, 2.0, 0.1), (32.0, 2.0, 0.4)],
    ids=["tight", "remembered", "forgotten"],
)
def test_iterations_with_documents_are_within_a_share_of_the_tightest_first_token_objective(
    now: float, ttft_s: float, longest_s: float
) -> None:
    """A fifth of it, until 30 s after its last request."""
    policy = make_policy("aligned_slo")
    policy.plan(view_of({"chat": chat(9, 0.5, arrival_s=1.0)}, now=1.0))
    answer = chat(9, ttft_s, num_generated=1, arrival_s=now - 0.1, last_token_s=now)
    view = view_of({"answer": answer, "document": PROMPT}, now=now)
    plan = policy.plan(view)
    assert longest_s - 0.002 <= seconds_of(view, scheduled_of(view, plan)) <= longest_s


def test_an_idle_worker_computes_no_document_for_longer_than_the_next_chat_may_wait() -> None:
    policy, history = make_policy("aligned_slo"), IterationHistory()
    view = view_of({"document": PROMPT}, now=1.0)
    assert scheduled_of(view, policy.plan(view)) == {"document": 500}  # no chat is known
    history.urgent_began(1.0)  # of which the next table shows nothing
    history.note(0.02, is_urgent=True)
    history.note(0.9)
    assert scheduled_of(view, policy.plan(replace(view, now=2.0, history=history))) == {"document": 190}
    history.note(0.2)
    assert scheduled_of(view, policy.plan(replace(view, now=602.0, history=history))) == {"document": 190}
    assert scheduled_of(view, policy.plan(replace(view, now=603.0, history=history))) == {"document": 500}


@each(("deadline_s", "num_beside"), [(1.62, 3), (1.25, 0), (9.0, 7)])
def test_documents_pause_for_a_document_that_would_be_late_with_longer_iterations(
    deadline_s: float, num_beside: int
) -> None:
    """It needs 90 tokens: in iterations of 16 ms it is in time, alone in 11.5 ms; each of the others adds 1.5 ms."""
    other = document(40, num_generated=10, predicted_len=100)
    rows = {f"other{number}": other for number in range(7)} | {"due": other | {"deadline_s": 1.0 + deadline_s}}
    got = scheduled(rows, history=[0.022])
    assert "due" in got
    assert len(got) == 1 + num_beside


def test_first_token_objectives_bound_no_iteration_of_a_decode_worker() -> None:
    """An iteration takes 10 ms and 2 for each answer: a fifth of the TTFT leaves documents no time, the TPOT all."""
    rows = with_documents(ANSWER | {"ttft_s": 0.06, "first_token_s": 0.05}, 9)
    view = replace(view_of(rows, now=1.0), computes_prompts=False)
    assert len(make_policy("aligned_slo").plan(view).scheduled) == 10
    assert len(scheduled(rows)) == 1


def test_on_prefill_workers_documents_wait_for_chats_and_nothing_is_evicted() -> None:
    rows: Rows = {"document": PROMPT, "late": chat(60, 0.1), "question": chat(60, 1.0, arrival_s=0.9)}
    rows = {name: row | {"num_blocks": 1} for name, row in rows.items()}
    prefill: dict[str, Any] = {"block_size": 1 << 40, "num_blocks": 3, "can_evict": False}
    assert decided(rows, **prefill) == ({"question": 60, "late": 60}, [])
    assert decided({"document": rows["document"]}, **prefill) == ({"document": 500}, [])


@dataclass(frozen=True)
class _DearLogits(EasyCosts):
    @override
    def iteration_s(self, work: IterationWork) -> float:
        return super().iteration_s(work) + 0.004 * work.num_sampled


@each(("num_prompt_logprobs", "num_tokens"), [(None, 74), (1, 15)])
def test_a_prompt_that_is_scored_is_as_long_as_its_rows_of_logits_allow(
    num_prompt_logprobs: int | None, num_tokens: int
) -> None:
    """Within 90 ms less 12 for the answer; a row of logits costs as much as four tokens."""
    rows: Rows = {"answer": ANSWER | {"first_token_s": 0.9}, "scored": document(400)}
    rows["scored"] |= {"num_prompt_logprobs": num_prompt_logprobs}
    assert scheduled(rows, costs=_DearLogits())["scored"] in range(num_tokens - 4, num_tokens + 1)


# --- guarantees


def first_turn(name: str, rows: Rows, params: dict[str, Any] | None = None, most: int = 60, **worker: Any) -> int:
    """Plan again and again for the same requests; return how often before this one was in a plan."""
    policy, view = make_policy("aligned_slo", params), view_of(rows, now=1.0, **worker)
    for number in range(most):
        plan = policy.plan(view)
        assert_sound(view, plan)
        if name in scheduled_of(view, plan):
            return number
    return most


@each(("floor", "num_before"), [(0.05, 4), (0.1, 2), (0.0, 60)])
def test_a_document_begins_once_its_class_is_owed_all_of_it(floor: float, num_before: int) -> None:
    """It takes 60 ms. An iteration computes 300 tokens of chat in 310 ms, and owes 5/95 of it: 16.3 ms."""
    rows: Rows = {"document": document(60, arrival_s=-100.0), "question": chat(300, 1.0, arrival_s=0.9)}
    assert first_turn("document", rows, {"best_effort_floor": floor}) == num_before
    prefill: dict[str, Any] = {"block_size": 1 << 40, "num_blocks": 2, "can_evict": False}
    held = {name: row | {"num_blocks": 1} for name, row in rows.items()}
    assert first_turn("document", held, {"best_effort_floor": floor}, **prefill) == num_before


def test_an_overdue_chat_begins_once_it_is_owed_all_of_it() -> None:
    """Overdue: it has waited for twice its objective. The others fill the iteration."""
    rows: Rows = {"overdue": chat(60, 1.0, arrival_s=-1.1), "question": chat(300, 1.0, arrival_s=0.9)}
    assert first_turn("overdue", rows, max_tokens=300) == 5
    assert first_turn("overdue", rows, {"best_effort_floor": 0.0}, max_tokens=300) == 60
    rows["overdue"] |= {"arrival_s": -0.5}
    assert first_turn("overdue", rows, max_tokens=300) == 60


def test_a_chat_that_lost_its_cache_returns_once_it_is_owed_all_of_it() -> None:
    """It has to compute 64 tokens again; for ten seconds it waits for its turn."""
    lost = LATE_ANSWER | {"prompt_len": 54, "num_cached": 0, "arrival_s": -20.0}
    rows: Rows = {"lost": lost | {"last_token_s": -9.1}, "question": chat(300, 1.0, arrival_s=0.9)}
    assert first_turn("lost", rows, max_tokens=300) == 5
    rows["lost"] |= {"last_token_s": -8.9}
    assert first_turn("lost", rows, max_tokens=300) == 60


def test_blocks_are_kept_for_who_is_owed_all_of_it() -> None:
    """It needs 19 blocks and 12 are free: from its turn on no newcomer takes them. Then it has them first."""
    rows: Rows = {"answer": ANSWER | {"prompt_len": 438, "tpot_s": 9.0}}
    rows |= {"large": document(300, arrival_s=-100.0), "question": chat(100, 9.0, arrival_s=0.9)}
    policy = make_policy("aligned_slo")

    def plan(num_blocks: int) -> dict[str, int]:
        view = view_of(rows, now=1.0, num_blocks=num_blocks)
        return scheduled_of(view, policy.plan(view))

    before = [plan(40) for _ in range(80)]
    assert before[0] == {"answer": 1, "question": 100}
    assert before[-1] == {"answer": 1}
    assert plan(60)["large"] == 300


def test_who_has_a_guarantee_is_not_evicted() -> None:
    """Three documents hold ten blocks each: the first of them stays."""
    rows: Rows = {f"d{number}": DOCUMENT | {"prompt_len": 150, "num_generated": 3} for number in range(3)}
    rows["question"] = chat(300, 1.0, arrival_s=0.9)
    got, evicted = decided(rows, num_blocks=30)
    assert got["question"] == 300
    assert evicted == [("d2", "drop"), ("d1", "drop")]
    assert decided(rows | {"question": rows["question"] | {"prompt_len": 330}}, num_blocks=30)[1] == []


def test_blocks_are_kept_for_each_guarantee() -> None:
    """The document needs 19 blocks and the overdue chat 7. A chat that needs 4 of 6 waits."""
    policy, overdue = make_policy("aligned_slo"), chat(100, 1.0, arrival_s=-2.0)
    rows: Rows = {"answer": ANSWER, "question": QUESTION, "overdue": overdue, "document": document(300)}
    longer = {"overdue": overdue | {"prompt_len": 4000}, "document": document(4000), "question": chat(100, 9.0)}
    for _ in range(100):  # until both are owed enough
        policy.plan(view_of(rows | longer, now=1.0))
    view = view_of(rows, now=1.0, num_blocks=7 + 6)
    assert scheduled_of(view, policy.plan(view)) == {"answer": 1}


def test_blocks_are_kept_from_newcomers_and_not_from_prompts_that_have_begun() -> None:
    rows: Rows = {"answer": ANSWER, "begun": chat(400, 9.0, num_cached=200), "document": document(350)}
    policy, view = make_policy("aligned_slo"), view_of(rows, now=1.0, num_blocks=7 + 13 + 20)
    assert all("begun" in scheduled_of(view, policy.plan(view)) for _ in range(100))


# --- memory

FULL: dict[str, Any] = {"prompt_len": 111, "num_generated": 2, "ttft_s": 9.0, "tpot_s": 9.0}
"""A chat whose next token takes a block."""


@each(("waiting", "evicted"), [({}, ["d1"]), ({"ttft_s": 0.1}, ["d1"]), ({"be": True}, [])])
def test_documents_give_their_memory_to_chats_and_to_no_document(waiting: dict[str, Any], evicted: list[str]) -> None:
    rows: Rows = {"d0": DOCUMENT, "d1": DOCUMENT, "waiting": QUESTION | waiting}
    got, left = decided(rows, num_blocks=14)
    assert [name for name, _ in left] == evicted
    assert ("waiting" in got) is bool(evicted)


def test_prompts_of_a_worse_group_give_their_memory_to_chats_on_time() -> None:
    begun = chat(200, 0.6, num_cached=190)
    assert decided({"late": begun, "question": QUESTION}, num_blocks=13) == ({"question": 60}, [("late", "drop")])
    in_time = begun | {"ttft_s": 9.0}
    assert decided({"in time": in_time, "question": QUESTION}, num_blocks=13) == ({"in time": 10}, [])


@each("answer", [ANSWER, LATE_ANSWER, LATE_ANSWER | {"num_cached": 96}], ids=["on time", "late", "computed again"])
def test_no_answer_that_has_begun_gives_its_memory_to_a_newcomer(answer: dict[str, Any]) -> None:
    rows: Rows = {"answer": answer, "newcomer": QUESTION | {"priority": -1}}
    got, evicted = decided(rows, num_blocks=8, num_free_host=500)
    assert (list(got), evicted) == (["answer"], [])


def test_who_does_not_fit_evicts_none_in_vain_and_is_overtaken_by_chats() -> None:
    short = DOCUMENT | {"prompt_len": 20}
    rows: Rows = {"answer": ANSWER, "d0": short, "d1": short, "large": chat(130, 5.0), "small": chat(20, 9.0)}
    # 11 of 14 blocks are held, two of them by a document that may leave; one is for the next tokens of the answer.
    assert decided(rows, num_blocks=14) == ({"answer": 1, "small": 20, "d0": 1, "d1": 1}, [])
    rows["large"]["prompt_len"] = 64
    assert decided(rows, num_blocks=14)[1] == [("d1", "drop")]


def test_documents_wait_for_memory_in_order() -> None:
    rows: Rows = {"d0": DOCUMENT, "large": document(200), "small": document(20, arrival_s=0.5)}
    assert scheduled(rows, num_blocks=12) == {"d0": 1}
    assert set(scheduled(rows, num_blocks=40)) == {"d0", "large", "small"}


@each(
    ("others", "evicted"),
    [
        ({"d0": DOCUMENT, "d1": DOCUMENT, "later": ANSWER}, "d1"),
        ({"later": LATE_ANSWER, "latest": ANSWER}, "later"),
        ({"later": ANSWER, "latest": ANSWER}, "latest"),
        ({"later": ANSWER | {"priority": 1}, "latest": ANSWER}, "later"),
    ],
    ids=["documents", "late", "latest", "unimportant"],
)
def test_who_grows_takes_a_block_from_the_end_of_the_order(others: Rows, evicted: str) -> None:
    got, left = decided({"full": FULL, **others}, num_blocks=7 + 7 * len(others))
    assert [name for name, _ in left] == [evicted]
    assert "full" in got


def test_who_is_the_last_waits_for_a_block() -> None:
    assert decided({"answer": ANSWER, "full": FULL}, num_blocks=14) == ({"answer": 1}, [])


@each(
    ("costs", "num_free_host", "how"),
    [(EasyCosts(), 500, "swap"), (EasyCosts(), 90, "drop"), (EasyCosts(swap_token_s=0.001), 500, "drop")],
    ids=["faster", "no room", "slower"],
)
def test_a_cache_is_copied_out_where_that_takes_less_than_to_compute_it_again(
    costs: EasyCosts, num_free_host: int, how: str
) -> None:
    rows: Rows = {"d0": DOCUMENT, "d1": DOCUMENT, "question": QUESTION}
    assert decided(rows, num_blocks=14, costs=costs, num_free_host=num_free_host)[1] == [("d1", how)]


@each(
    ("row", "is_back"),
    [
        (DOCUMENT | {"prompt_len": 600, "num_swapped": 609}, True),
        (DOCUMENT | {"prompt_len": 1000, "num_swapped": 1009}, False),
        (LATE_ANSWER | {"prompt_len": 1000, "num_swapped": 1009}, True),
    ],
    ids=["short", "long", "long, of a chat"],
)
def test_a_cache_comes_back_within_the_time_of_an_iteration_and_that_of_a_chat_in_any_case(
    row: dict[str, Any], *, is_back: bool
) -> None:
    """Copies of 61 and 101 ms, of 90 that the answer has left."""
    assert ("row" in scheduled({"answer": ANSWER | {"first_token_s": 0.2}, "row": row})) is is_back


@each("is_chat", [True, False])
def test_no_plan_is_empty_while_there_are_requests(*, is_chat: bool) -> None:
    """Prompts hold all blocks, and none can go on without those of another."""
    rows: Rows = {f"{number}": {"be": not is_chat, "prompt_len": 100, "num_cached": 48} for number in range(3)}
    got, evicted = decided(rows, num_blocks=9)
    assert got == {"0": 52}
    assert [name for name, _ in evicted] == ["2", "1"]


# --- parameters


@each(
    "params",
    [
        *({"interference": bound} for bound in (0.99, -1.0, 10.01, float("nan"))),
        *({"best_effort_floor": floor} for floor in (-0.01, 0.51)),
        *({name: share} for name in ("slack_share", "response_share") for share in (0.0, 1.01)),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        make_policy("aligned_slo", params)

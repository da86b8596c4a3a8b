"""aligned_slo: the worked example of its page, and one decision per test."""

from dataclasses import replace
from typing import Any

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig
from alignedserve.core.ids import BatchId
from alignedserve.scheduling.policies import make_policy, policy_config, policy_entry
from alignedserve.scheduling.policy import IterationHistory, WorkerView
from decode_worker.batching.batch_order import BatchOrder, WaitingBatch
from decode_worker.factory import batch_limits_of
from decode_worker.state import Candidate
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of
from tests.support.marks import each
from tests.support.samples import handoff, request


def example(tpot_s: float, **worker: Any) -> WorkerView:
    """An answer is being read, a question has just come, one document is being written and one has to be read."""
    answer = {"prompt_len": 90, "num_generated": 10, "ttft_s": 0.4, "tpot_s": tpot_s}
    return view_of(
        {
            "answer": answer | {"first_token_s": 0.3, "last_token_s": 0.99},
            "question": {"prompt_len": 60, "ttft_s": 0.4, "tpot_s": tpot_s, "arrival_s": 0.95},
            "written": {"be": True, "prompt_len": 390, "num_generated": 10, "last_run_s": 0.99},
            "read": {"be": True, "prompt_len": 500, "arrival_s": 0.5},
        },
        now=1.0,
        history=[0.02],
        **worker,
    )


def planned(view: WorkerView) -> dict[str, int]:
    plan = make_policy("aligned_slo").plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan)


def test_the_example_of_the_page() -> None:
    assert planned(example(tpot_s=0.1)) == {"answer": 1, "question": 60, "written": 1, "read": 3}


def test_the_example_with_half_the_time() -> None:
    assert planned(example(tpot_s=0.05)) == {"answer": 1, "question": 24}


def test_without_objectives_the_iteration_is_filled() -> None:
    rows: dict[str, dict[str, Any]] = {
        "decodes": {"prompt_len": 40, "num_generated": 5},
        "long": {"prompt_len": 600, "predicted_len": 80, "arrival_s": 0.1},
        "short": {"prompt_len": 100, "predicted_len": 10, "arrival_s": 0.2},
    }
    assert planned(view_of(rows, now=1.0)) == {"decodes": 1, "short": 100, "long": 411}


def test_best_effort_gives_its_blocks_to_a_question_that_cannot_wait() -> None:
    rows: dict[str, dict[str, Any]] = {
        "document": {"be": True, "prompt_len": 150, "num_generated": 3},
        "question": {"prompt_len": 60, "ttft_s": 0.4, "arrival_s": 0.9},
    }
    view = view_of(rows, now=1.0, num_blocks=11)
    plan = make_policy("aligned_slo").plan(view)
    assert scheduled_of(view, plan) == {"question": 60}
    assert evicted_of(view, plan) == [("document", "drop")]


def test_equals_do_not_take_each_others_blocks() -> None:
    rows: dict[str, dict[str, Any]] = {
        "first": {"be": True, "prompt_len": 150, "num_generated": 3},
        "second": {"be": True, "prompt_len": 140, "arrival_s": 0.5},
    }
    view = view_of(rows, now=1.0, num_blocks=11)
    plan = make_policy("aligned_slo").plan(view)
    assert scheduled_of(view, plan) == {"first": 1}
    assert not plan.evictions


def test_who_has_waited_beyond_the_bound_has_a_tenth_of_the_iteration_before_all_others() -> None:
    """An iteration may take a fifth of 1 s, and 10 ms of it whatever it does; the question by itself takes 160 ms."""
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 300, "arrival_s": -1000.0},
        "question": {"prompt_len": 300, "ttft_s": 1.0, "arrival_s": 0.9},
    }
    assert planned(view_of(rows, now=1.0)) == {"forgotten": 20, "question": 300}
    rows["forgotten"]["arrival_s"] = 0.0
    assert planned(view_of(rows, now=1.0)) == {"question": 300}


@each(("waited_s", "does_begin"), [(599.0, False), (601.0, True)])
def test_who_may_have_very_much_left_waits_no_longer_than_ten_times_the_bound(
    waited_s: float, does_begin: bool
) -> None:
    """Where nothing is known of answers, they count as long as the model's context."""
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 300, "arrival_s": 1.0 - waited_s, "max_tokens": 100_000},
        "question": {"prompt_len": 300, "ttft_s": 1.0, "arrival_s": 0.9},
    }
    assert ("forgotten" in planned(view_of(rows, now=1.0))) is does_begin


@each(
    ("floor", "waited_s", "num_before"),
    [(0.05, 100.0, 4), (0.1, 100.0, 2), (0.0, 100.0, 9), (0.05, 700.0, 0), (0.0, 700.0, 9)],
)
def test_a_document_that_has_waited_begins_once_its_class_is_owed_its_tokens(
    floor: float, waited_s: float, num_before: int
) -> None:
    """60 of them: each iteration computes 300 of chat. One that has waited ten times as long is owed them."""
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 60, "arrival_s": 1.0 - waited_s},
        "question": {"prompt_len": 300, "ttft_s": 1.0, "arrival_s": 0.9},
    }
    policy, view = make_policy("aligned_slo", {"best_effort_floor": floor}), view_of(rows, now=1.0)
    found = ["forgotten" in scheduled_of(view, policy.plan(view)) for _ in range(9)]
    assert (found.index(True) if any(found) else 9) == num_before


def test_a_document_whose_blocks_are_held_before_it_is_computed_is_owed_its_tokens_as_well() -> None:
    """On prefill workers it had a tenth of the time, whatever the floor."""
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 60, "arrival_s": -100.0, "num_blocks": 1},
        "question": {"prompt_len": 300, "ttft_s": 1.0, "arrival_s": 0.9, "num_blocks": 1},
    }
    view = view_of(rows, now=1.0, block_size=1 << 40, num_blocks=2, can_evict=False)
    assert "forgotten" not in scheduled_of(view, make_policy("aligned_slo", {"best_effort_floor": 0.0}).plan(view))
    rows["forgotten"] |= {"num_cached": 20, "service_s": 0.1}  # it has begun
    view = view_of(rows, now=1.0, block_size=1 << 40, num_blocks=2, can_evict=False)
    assert "forgotten" in scheduled_of(view, make_policy("aligned_slo", {"best_effort_floor": 0.0}).plan(view))


def test_what_documents_have_of_the_time_that_is_left_counts_for_their_floor() -> None:
    """Sixteen decode beside chat, and have what 300 of its tokens owe them."""
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 60, "arrival_s": -100.0},
        "question": {"prompt_len": 150, "ttft_s": 1.0, "arrival_s": 0.9},
        **{
            f"document-{number}": {"be": True, "prompt_len": 10, "num_generated": 1, "deadline_s": 1e6}
            for number in range(16)
        },
    }
    policy, view = make_policy("aligned_slo"), view_of(rows, now=1.0, max_running_requests=17)
    found = [scheduled_of(view, policy.plan(view)) for _ in range(20)]
    assert {len(one) for one in found} == {17}
    assert not any("forgotten" in one for one in found)


def test_who_has_waited_beyond_the_bound_fills_what_no_other_needs() -> None:
    rows: dict[str, dict[str, Any]] = {
        "forgotten": {"be": True, "prompt_len": 300, "arrival_s": -100.0},
        "question": {"prompt_len": 50, "ttft_s": 1.0, "arrival_s": 0.9},
    }
    assert planned(view_of(rows, now=1.0)) == {"question": 50, "forgotten": 140}


def test_decodes_of_who_has_waited_beyond_the_bound_take_no_more_than_their_share_from_others() -> None:
    rows: dict[str, dict[str, Any]] = {
        f"forgotten-{number}": {"be": True, "prompt_len": 10, "num_generated": 5, "arrival_s": -100.0 - number}
        for number in range(30)
    }
    # An iteration may take 0.9 of its 200 ms: 18 ms are the share, 10 of them any iteration's, 1.15 for each decode.
    question = {"prompt_len": 175, "ttft_s": 1.0, "arrival_s": 0.2}
    scheduled = planned(view_of(rows | {"question": question}, now=1.0))
    assert scheduled.pop("question") == 175
    assert len(scheduled) == 6


def test_smaller_priority_goes_first_among_equals() -> None:
    rows: dict[str, dict[str, Any]] = {
        "plain": {"prompt_len": 300, "arrival_s": 0.0},
        "before": {"prompt_len": 300, "arrival_s": 0.5, "priority": -1},
    }
    assert list(planned(view_of(rows, now=1.0))) == ["before", "plain"]


def test_before_its_first_token_a_chat_goes_by_its_prompt_and_not_by_its_answer() -> None:
    rows: dict[str, dict[str, Any]] = {
        "short answer": {"prompt_len": 90, "ttft_s": 5.0, "predicted_len": 5},
        "short prompt": {"prompt_len": 80, "ttft_s": 5.0, "predicted_len": 900},
    }
    assert list(planned(view_of(rows, max_tokens=100))) == ["short prompt", "short answer"]


def test_a_deadline_that_presses_lets_no_document_pass_chat() -> None:
    rows: dict[str, dict[str, Any]] = {
        "pressed": {"be": True, "prompt_len": 300, "predicted_len": 1, "arrival_s": 0.2, "deadline_s": 1.3},
        "late": {"prompt_len": 30, "ttft_s": 0.5, "arrival_s": 0.3},
        "in time": {"prompt_len": 30, "ttft_s": 5.0, "arrival_s": 0.9},
    }
    assert list(planned(view_of(rows, now=1.0))) == ["in time", "late", "pressed"]


@each(("deadline_s", "num_beside"), [(1.62, 3), (1.3, 0), (9.0, 7)])
def test_others_pause_for_a_document_that_would_be_late_with_longer_iterations(
    deadline_s: float, num_beside: int
) -> None:
    """It needs 90 tokens: in iterations of 16 ms it is in time, alone in 11.5 ms; each of the others adds 1.5 ms."""
    document = {"be": True, "prompt_len": 40, "num_generated": 10, "predicted_len": 100, "last_run_s": 0.99}
    rows = {"due": document | {"deadline_s": 1.0 + deadline_s}}
    rows |= {f"other{number}": dict(document) for number in range(7)}
    scheduled = planned(view_of(rows, now=1.0, history=[0.022]))
    assert "due" in scheduled
    assert len(scheduled) == 1 + num_beside


def test_a_document_that_presses_takes_no_memory_from_one_that_does_not() -> None:
    """The one that gave its memory would press next, and its whole cache would have to be computed again."""
    rows: dict[str, dict[str, Any]] = {
        "idle": {"be": True, "prompt_len": 150, "num_generated": 3},
        "pressed": {"be": True, "prompt_len": 140, "predicted_len": 20, "arrival_s": 0.5, "deadline_s": 1.6},
    }
    view = view_of(rows, now=1.0, num_blocks=11)
    plan = make_policy("aligned_slo").plan(view)
    assert scheduled_of(view, plan) == {"idle": 1}
    assert not plan.evictions


@each(("deadline_s", "order"), [(1.3, ["pressed", "idle"]), (1.9, ["pressed", "idle"]), (2.1, ["idle", "pressed"])])
def test_a_deadline_that_presses_goes_before_what_can_wait(deadline_s: float, order: list[str]) -> None:
    """Each takes 0.3 s: of the time until the deadline, 0.5, 1.1 or 1.3 s, a quarter would be too little, or not."""
    rows: dict[str, dict[str, Any]] = {
        "idle": {"be": True, "prompt_len": 300, "predicted_len": 1},
        "pressed": {"be": True, "prompt_len": 300, "predicted_len": 1, "arrival_s": 0.2, "deadline_s": deadline_s},
    }
    assert list(planned(view_of(rows, now=1.0))) == order


def test_a_pass_that_stops_for_chats_is_longer_while_none_waits() -> None:
    """A pass takes a fifth of the TTFT, 1 s, or 0.35 of it if it stops; 12 ms are the answer's token and its own."""
    answer = {"prompt_len": 90, "num_generated": 10, "ttft_s": 1.0, "last_token_s": 0.99}
    question = {"prompt_len": 60, "ttft_s": 1.0, "arrival_s": 0.95}
    document = {"be": True, "prompt_len": 500}
    policy = make_policy("aligned_slo")

    def tokens(*, passes_stop: bool = True, **chats: Any) -> int:
        view = replace(view_of(chats | {"document": document}, now=1.0), passes_stop=passes_stop)
        return scheduled_of(view, policy.plan(view))["document"]

    assert tokens(answer=answer, passes_stop=False) == 188
    assert 337 <= tokens(answer=answer) <= 338
    assert tokens(answer=answer, question=question) == 128
    assert 339 <= tokens() <= 340  # of a prefill worker, which has no decodes


def test_a_pass_is_bounded_by_chats_that_it_has_stopped_for_and_by_the_last_ones() -> None:
    """On a prefill worker such a chat is gone when the next pass is planned: within 0.35 of its TTFT, later half."""
    policy, history = make_policy("aligned_slo"), IterationHistory()

    def tokens(now: float) -> int:
        view = view_of({"document": {"be": True, "prompt_len": 900}}, now=now, max_tokens=900)
        view = replace(view, history=history, passes_stop=True)
        return scheduled_of(view, policy.plan(view))["document"]

    assert tokens(1.0) == 900
    history.urgent_began(1.0)
    history.note(0.02, is_urgent=True)
    history.note(0.9)
    assert 339 <= tokens(2.0) <= 340
    history.note(0.3)
    assert 339 <= tokens(31.0) <= 340
    assert 489 <= tokens(33.0) <= 490


@each(("now", "most"), [(1.0, 200), (30.0, 200), (32.0, 500), (3600.0, 500)])
def test_the_first_chat_of_a_burst_finds_no_iteration_longer_than_half_of_its_objective(now: float, most: int) -> None:
    policy = make_policy("aligned_slo")
    chat, document = {"prompt_len": 90, "num_generated": 10, "ttft_s": 1.0}, {"be": True, "prompt_len": 2000}
    policy.plan(view_of({"chat": chat | {"last_token_s": 0.99}}, now=1.0))
    view = view_of({"document": document}, now=now, max_tokens=2000)
    assert most - 15 <= scheduled_of(view, policy.plan(view))["document"] <= most


@each(("ttft_s", "least", "most"), [(0.06, 4, 8), (0.03, 0, 4), (0.02, 400, 500)])
def test_an_objective_of_few_iterations_bounds_them_all_the_same(ttft_s: float, least: int, most: int) -> None:
    """The answer's token takes 11 ms: of 60 ms more than a fifth, of 30 ms less than half, of 20 ms more."""
    chat, document = {"prompt_len": 90, "num_generated": 10, "ttft_s": ttft_s}, {"be": True, "prompt_len": 500}
    view = view_of({"chat": chat | {"last_token_s": 0.99}, "document": document}, now=1.0)
    assert least <= scheduled_of(view, make_policy("aligned_slo").plan(view)).get("document", 0) <= most


@each(("computes_prompts", "num_documents"), [(True, 1), (False, 9)])
def test_first_token_objectives_bound_no_iteration_of_a_decode_worker(
    computes_prompts: bool, num_documents: int
) -> None:
    """An iteration takes 10 ms and 2 for each answer: half of the TTFT leaves one document a place, the TPOT all."""
    slo = {"ttft_s": 0.03, "tpot_s": 0.04}
    rows: dict[str, dict[str, Any]] = {"chat": {"prompt_len": 90, "num_generated": 10, "last_token_s": 1.0, **slo}}
    rows |= {f"document{number}": {"be": True, "prompt_len": 90, "num_generated": 10} for number in range(9)}
    view = replace(view_of(rows, now=1.0), computes_prompts=computes_prompts)
    assert len(scheduled_of(view, make_policy("aligned_slo").plan(view))) == 1 + num_documents


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

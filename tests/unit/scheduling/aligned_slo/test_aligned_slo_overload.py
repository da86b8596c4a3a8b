"""aligned_slo where there is more to do than can be done in time, or than there is memory for."""

from typing import Any

from tests.harnesses.scheduling import decision_of

Rows = dict[str, dict[str, Any]]


def planned(rows: Rows, **worker: Any) -> tuple[dict[str, int], list[str]]:
    scheduled, evicted = decision_of("aligned_slo", rows, **worker)
    return scheduled, [request_id for request_id, _ in evicted]


def test_an_objective_shorter_than_the_decodes_holds_none_back() -> None:
    rows: Rows = {
        "chat": {"prompt_len": 40, "num_generated": 1},
        "hasty": {"prompt_len": 10, "ttft_s": 0.001},
        "batch": {"prompt_len": 30, "be": True},
    }
    assert planned(rows)[0] == {"chat": 1, "hasty": 10, "batch": 30}


def test_best_effort_work_ends_before_a_prompt_to_come_would_be_late() -> None:
    """A fifth of 0.2 s are 40 ms: 10 for the iteration, 1.41 for the decode, 28 tokens, 10 of them the prompt's."""
    rows: Rows = {
        "chat": {"prompt_len": 40, "num_generated": 1},
        "prompt": {"prompt_len": 10, "ttft_s": 0.2},
        "batch": {"prompt_len": 100, "be": True},
    }
    assert planned(rows)[0] == {"chat": 1, "prompt": 10, "batch": 18}


def test_a_real_time_prompt_is_not_cut_for_prompts_to_come() -> None:
    rows: Rows = {"chat": {"prompt_len": 40, "num_generated": 1}, "prompt": {"prompt_len": 100, "ttft_s": 0.2}}
    assert planned(rows)[0] == {"chat": 1, "prompt": 100}


def test_who_does_not_fit_lets_others_by_and_evicts_none_in_vain() -> None:
    rows: Rows = {
        "chat": {"prompt_len": 100, "num_generated": 1, "tpot_s": 1.0, "ttft_s": 1.0},
        "batch": {"prompt_len": 30, "num_generated": 1, "be": True},
        "large": {"prompt_len": 130, "ttft_s": 5.0},
        "small": {"prompt_len": 20, "ttft_s": 0.001, "arrival_s": -1.0},
    }
    # 7 and 2 blocks are held and 5 free. The large one lacks 9, and would have 7 with those of the batch.
    assert planned(rows, num_blocks=14) == ({"chat": 1, "small": 20, "batch": 1}, [])
    rows["large"]["prompt_len"] = 60
    assert planned(rows, num_blocks=13) == ({"chat": 1, "large": 60}, ["batch"])


def test_who_has_waited_too_long_has_its_share_of_the_memory_kept_for_it() -> None:
    rows: Rows = {
        "chat": {"prompt_len": 1080, "num_generated": 1, "ttft_s": 1.0, "tpot_s": 1.0},
        "waiting": {"prompt_len": 90, "be": True, "arrival_s": -1000.0, "predicted_len": 10},
        "new": {"prompt_len": 20, "ttft_s": 5.0},
    }
    # 68 blocks are held and 5 free. It needs 6 blocks, which are less than a tenth.
    assert planned(rows, num_blocks=73)[0] == {"chat": 1}
    rows["waiting"]["arrival_s"] = -50.0
    assert planned(rows, num_blocks=73)[0] == {"chat": 1, "new": 20}


def test_who_needs_more_than_the_share_keeps_no_chat_out() -> None:
    rows: Rows = {
        "chat": {"prompt_len": 100, "num_generated": 1, "ttft_s": 1.0, "tpot_s": 1.0},
        "large": {"prompt_len": 90, "be": True, "arrival_s": -100.0, "predicted_len": 10},
        "new": {"prompt_len": 20, "ttft_s": 5.0},
    }
    assert planned(rows, num_blocks=12)[0] == {"chat": 1, "new": 20}


def test_documents_that_have_waited_too_long_give_their_memory_to_chat_but_for_a_share() -> None:
    waited: dict[str, Any] = {"be": True, "prompt_len": 150, "num_generated": 5, "arrival_s": -200.0}
    documents: Rows = {f"document{number}": waited for number in range(20)}
    rows: Rows = {**documents, "question": {"prompt_len": 60, "ttft_s": 0.2, "tpot_s": 0.1}}
    scheduled, evicted = planned(rows, num_blocks=200)  # each document holds ten, all of them
    assert scheduled["question"] == 60
    assert evicted == ["document19"]
    assert "document0" in scheduled  # which has the share of the time, too


def test_who_has_only_waited_long_takes_no_cache() -> None:
    rows: Rows = {
        "late": {"prompt_len": 100, "num_generated": 5, "ttft_s": 0.1, "first_token_s": 0.5},
        "large": {"prompt_len": 90, "ttft_s": 0.1, "arrival_s": -100.0, "predicted_len": 10},
    }
    assert planned(rows, num_blocks=12) == ({"late": 1}, [])


LATE: dict[str, Any] = {"prompt_len": 90, "num_generated": 5, "ttft_s": 0.1, "tpot_s": 1.0, "first_token_s": 0.5}
"""Its first token came too late."""


def beside_chat(**row: Any) -> dict[str, int]:
    """Return what is computed of this row beside a chat whose token takes 11.4 ms, of 11.2 that are allowed."""
    return beside_chat_all({"row": row})


def beside_chat_all(rows: Rows, *, max_running_requests: int = 64, **worker: Any) -> dict[str, int]:
    chat = {"prompt_len": 40, "num_generated": 1, "ttft_s": 1.0, "tpot_s": 0.0125}
    chat |= {"arrival_s": 19.99, "first_token_s": 20.0, "last_token_s": 20.0}
    rows = {"chat": chat, **rows}
    return planned(rows, now=20.0, max_running_requests=max_running_requests, **worker)[0]


def test_an_answer_that_has_begun_late_pauses_no_longer_than_a_second() -> None:
    assert beside_chat(**LATE, last_token_s=19.1) == {"chat": 1}
    assert beside_chat(**LATE, last_token_s=18.9) == {"chat": 1, "row": 1}


def test_one_that_has_lost_its_cache_returns_after_ten_seconds_by_its_share() -> None:
    lost = {**LATE, "num_cached": 0}
    assert beside_chat(**lost, last_token_s=10.1) == {"chat": 1}
    assert beside_chat(**lost, last_token_s=9.9) == {"chat": 1, "row": 1}


def test_it_does_not_wait_for_a_document_that_has_waited_for_longer() -> None:
    lost = {**LATE, "num_cached": 0, "last_token_s": 9.9}
    document = {"prompt_len": 90, "be": True, "arrival_s": -1000.0, "predicted_len": 10}
    assert beside_chat_all({"document": document, "lost": lost}) == {"chat": 1, "document": 1, "lost": 1}


def test_the_late_chat_furthest_behind_keeps_the_cache_that_was_computed_again() -> None:
    late = {**LATE, "tpot_s": 0.1, "last_token_s": 99.9}
    rows: Rows = {
        "behind": {**late, "num_generated": 20},  # its next token was due at 2.5 s
        "less": {**late, "num_generated": 40},  # and of this one, which has less left to do, at 4.5 s
        "new": {"prompt_len": 64, "ttft_s": 1.0, "tpot_s": 1.0, "arrival_s": 99.4},
    }
    assert planned(rows, now=100.0, num_blocks=19) == ({"new": 64, "behind": 1}, ["less"])


def test_a_chat_overdue_to_begin_has_a_share_of_the_time_of_those_on_time() -> None:
    waiting = {"prompt_len": 90, "predicted_len": 10, "ttft_s": 1.0}
    assert beside_chat(**waiting, arrival_s=-10.9) == {"chat": 1}
    assert beside_chat(**waiting, arrival_s=-11.1) == {"chat": 1, "row": 1}
    # Without an objective it is not late: it waits as long as a document that is owed to the floor.
    has_waited = {"prompt_len": 90, "predicted_len": 10, "arrival_s": -200.0}
    assert beside_chat(**has_waited) == {"chat": 1, "row": 1}
    assert beside_chat(**has_waited, be=True) == {"chat": 1}
    assert beside_chat(**has_waited | {"arrival_s": -1000.0}, be=True) == {"chat": 1, "row": 1}


def test_those_that_have_begun_so_hold_no_more_than_a_share_of_the_places() -> None:
    waiting = {"prompt_len": 90, "predicted_len": 10, "ttft_s": 1.0}
    begun = {**LATE, "arrival_s": -50.0, "first_token_s": 19.0, "last_token_s": 19.9}
    rows: Rows = {"first": {**waiting, "arrival_s": -20.0}, "second": {**waiting, "arrival_s": -19.0}}
    assert beside_chat_all(rows, max_running_requests=10) == {"chat": 1, "first": 1}
    assert beside_chat_all({"begun": begun, **rows}, max_running_requests=10) == {"chat": 1}


def test_nor_more_than_a_share_of_the_memory() -> None:
    """One of 7 blocks has begun so, and the other would take 6: of 1 000 blocks both have a tenth, of 100 one has."""
    begun = {**LATE, "arrival_s": -50.0, "first_token_s": 19.0, "last_token_s": 19.9}
    first = {"prompt_len": 90, "predicted_len": 10, "ttft_s": 1.0, "arrival_s": -20.0}
    assert beside_chat_all({"begun": begun, "first": first}, num_blocks=1000) == {"chat": 1, "first": 1}
    assert beside_chat_all({"begun": begun, "first": first}, num_blocks=100) == {"chat": 1}
    assert beside_chat_all({"first": first}, num_blocks=40) == {"chat": 1, "first": 1}

"""aligned_slo where the bound of interference is set: how much documents prolong the gaps of chats."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alignedserve.scheduling.policies import make_policy
from tests.harnesses.scheduling import decision_of, scheduled_of, seconds_of, view_of
from tests.support.marks import each

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

"""Whether a pass stops for prompts: iterations take 10 ms and 1 ms for each token, and the model has ten layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from alignedserve.scheduling.policy import IterationPlan, ScheduledRequest, WorkerView
from alignedserve.scheduling.scheduler_state import Flight, work_of
from alignedserve.scheduling.yielding import StoppablePass, YieldConfig, Yielding, best_effort_share
from tests.harnesses.scheduling import EasyCosts, scheduled_of, view_of

DOCUMENT: Mapping[str, Any] = {"prompt_len": 400, "be": True}
CHAT: Mapping[str, Any] = {"prompt_len": 20}
PASS = {"document": 200}  # 210 ms
CONFIG = YieldConfig(10)


class Case:
    """A pass in flight since time 0, and a chat that has come."""

    def __init__(
        self,
        rows: Mapping[str, Mapping[str, Any]] | None = None,
        computing: Mapping[str, int] = PASS,
        config: YieldConfig = CONFIG,
        **view: Any,
    ) -> None:
        self.rows = rows or {"document": DOCUMENT, "chat": CHAT}
        self.view_fields = view
        self.rule = Yielding(config)
        self.computing = computing
        view_now = self.view(0.0)
        parts = [ScheduledRequest(view_now.table.row(name), count) for name, count in computing.items()]  # type: ignore[arg-type]
        plan = IterationPlan(tuple(parts))
        work = work_of(view_now.table, plan, view_now.memory)
        rows_of, counts = np.array([part.row for part in parts]), np.array([part.num_tokens for part in parts])
        self.flight = Flight(rows_of, counts, plan.scheduled, work, 0.0)
        share = best_effort_share(view_now.table, self.flight)
        self.stopped = StoppablePass(0.0, EasyCosts().iteration_s(work), share)

    def view(self, now: float) -> WorkerView:
        return view_of(self.rows, now=now, **self.view_fields)

    def asked(self, now: float = 0.05, *prompts: str) -> dict[str, int] | None:
        """Return the urgent iteration, by request."""
        view = self.view(now)
        rows = [view.table.row(name) for name in prompts or ("chat",)]  # type: ignore[arg-type]
        plan = self.rule.plan(view, self.stopped, self.flight, rows)
        return None if plan is None else scheduled_of(view, plan)


def test_a_pass_of_documents_stops_for_a_chat() -> None:
    assert Case().asked() == {"chat": 20}


def test_several_chats_are_one_iteration_within_its_tokens() -> None:
    case = Case({"document": DOCUMENT, "chat": CHAT, "other": {"prompt_len": 40}}, max_tokens=50)
    assert case.asked(0.05, "chat", "other") == {"chat": 20, "other": 30}


def test_what_is_cached_of_a_prompt_is_not_computed() -> None:
    assert Case({"document": DOCUMENT, "chat": {"prompt_len": 40, "num_cached": 32}}).asked() == {"chat": 8}


def test_a_pass_with_little_best_effort_work_goes_on() -> None:
    rows = {"document": DOCUMENT, "before": {"prompt_len": 300}, "chat": CHAT}
    assert Case(rows, {"document": 49, "before": 151}).asked() is None
    assert Case(rows, {"document": 51, "before": 149}).asked() == {"chat": 20}


def test_chats_that_the_pass_gives_their_first_token_do_not_wait_for_one_that_gains_less() -> None:
    """90 tokens of documents, 10 of each chat: 170 ms. It gains 0.56 * 160 + 120 - 17 ms, and each loses 30."""
    others = {f"c{number}": {"prompt_len": 10} for number in range(7)}
    rows = {"document": DOCUMENT, "chat": CHAT, **others}
    tokens = dict.fromkeys(others, 10)
    assert Case(rows, {"document": 90, **tokens}).asked() is None
    assert Case(rows, {"document": 90, **dict.fromkeys(list(tokens)[:4], 10)}).asked() == {"chat": 20}


def test_without_free_blocks_it_waits() -> None:
    assert Case(num_blocks=1, block_size=8).asked() is None


def test_a_pass_stops_for_what_would_be_beside_the_prompt_next_even_where_little_is_left() -> None:
    """210 ms and 20 tokens together are 230 ms, and the prompt alone 30: that is left of a pass that has ended."""
    assert Case().asked(0.3) == {"chat": 20}


def test_it_does_not_stop_where_that_costs_more_than_it_brings() -> None:
    """5 tokens take 15 ms, 20 more 35 together: 10 ms of cost against 3.5 to come."""
    rows = {"document": DOCUMENT, "chat": {"prompt_len": 20}}
    assert Case(rows, {"document": 5}).asked(0.015) is None


def test_a_pass_stops_a_few_times() -> None:
    case = Case()
    assert [case.asked() for _ in range(5)] == [{"chat": 20}] * 4 + [None]


def test_documents_keep_their_share_of_the_time() -> None:
    case = Case(config=YieldConfig(10, best_effort_floor=0.5))
    case.stopped.stopped_s = 0.179
    assert case.asked() == {"chat": 20}
    case.stopped.stopped_s = 0.181  # of 210 ms, and 30 for the chat
    assert case.asked() is None


def test_what_stops_cost_is_bounded_and_earned_again() -> None:
    """A stop costs 10 ms, as a pass of 210 earns."""
    case = Case(config=YieldConfig(10, credit_s=0.025, best_effort_floor=0.0))
    assert [case.asked() is not None for _ in range(3)] == [True, True, False]
    case.rule.pass_began(StoppablePass(0.0, 0.21, case.stopped.share))
    assert [case.asked() is not None for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("tpot_s", "predicted_len", "stops"),
    [
        (0.2, 2, True),
        (0.17, 2, False),
        (0.15, 2, True),  # it is late anyway
        (0.17, 4, False),
        (0.17, 6, True),  # 21 ms beyond 0.17 s, of 34 that its later tokens give back
    ],
)
def test_a_chat_in_the_pass_is_not_made_late(tpot_s: float, predicted_len: int, stops: bool) -> None:
    """Its token comes at 0.161 s, or 30 ms later."""
    before = {"prompt_len": 20, "num_generated": 1, "tpot_s": tpot_s, "predicted_len": predicted_len}
    rows: dict[str, Mapping[str, Any]] = {"document": DOCUMENT, "before": before, "chat": CHAT}
    case = Case(rows, {"document": 150, "before": 1})
    assert (case.asked() is not None) is stops


@pytest.mark.parametrize(("ttft_s", "stops"), [(0.22, True), (0.2, False)])
def test_the_first_token_of_a_chat_in_the_pass_is_not_made_late(ttft_s: float, stops: bool) -> None:
    """Let its first token come at 0.18 s, or 30 ms later, which no later token can make up for."""
    before = {"prompt_len": 20, "ttft_s": ttft_s, "tpot_s": 0.2, "predicted_len": 100}
    case = Case({"document": DOCUMENT, "before": before, "chat": CHAT}, {"document": 150, "before": 20})
    assert (case.asked() is not None) is stops


@pytest.mark.parametrize(("deadline_s", "stops"), [(0.55, True), (0.44, False), (0.2, True)])
def test_a_document_with_a_deadline_is_not_made_late(deadline_s: float, stops: bool) -> None:
    """It needs some 0.42 s more by itself."""
    rows: dict[str, Mapping[str, Any]] = {
        "document": {**DOCUMENT, "deadline_s": deadline_s, "max_tokens": 1},
        "chat": CHAT,
    }
    assert (Case(rows, {"document": 200}).asked(0.0) is not None) is stops


@pytest.mark.parametrize(
    ("chat", "stops"),
    [
        ({"tpot_s": 0.1, "max_tokens": 40}, False),  # 0.16 s are left, and 0.21 more: of 0.29 that it could wait for
        ({"tpot_s": 0.1, "max_tokens": 100}, True),  # of 0.59
        ({"tpot_s": 0.4, "max_tokens": 2}, True),
        ({"tpot_s": 0.1, "max_tokens": 40, "ttft_s": 0.2}, True),  # else its first token would be late
        ({"tpot_s": 0.1, "max_tokens": 40, "ttft_s": 0.3}, False),
    ],
)
def test_a_chat_that_could_not_afford_the_gap_after_its_first_token_waits(chat: Mapping[str, Any], stops: bool) -> None:
    rows = {"document": DOCUMENT, "chat": {**CHAT, **chat, "predicted_len": chat["max_tokens"]}}
    assert (Case(rows).asked() is not None) is stops
    elsewhere = Case(rows, config=YieldConfig(10, decodes_here=False))
    assert elsewhere.asked() is not None

"""aligned_slo when memory is short: who is ahead of its schedule lends memory to first tokens that would be late."""

from typing import Any

from alignedserve.scheduling.policies import make_policy
from tests.harnesses.scheduling import evicted_of, scheduled_of, view_of

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

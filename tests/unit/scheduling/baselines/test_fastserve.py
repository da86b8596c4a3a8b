"""FastServe: which queue a request joins, when it sinks, when it is promoted, and whom it displaces."""

from typing import Any

import numpy as np

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel
from lab.policies.fastserve import queue_of
from tests.harnesses.scheduling import decision_of, scheduled_of, view_of
from tests.support.marks import each

_RUNTIME = RequestRuntimeModel(prefill_token_s=0.001, decode_context_s=0.0, decode_s=0.010)  # quanta: 10, 20, 40, 80 ms
_Rows = dict[str, dict[str, Any]]

# The example of docs/policies/fastserve.md.
_EXAMPLE: _Rows = {
    "A": {"arrival_s": 12.5, "service_s": 0.13, "prompt_len": 30, "num_generated": 4},
    "B": {"arrival_s": 12.6, "service_s": 0.035, "prompt_len": 10, "num_generated": 3},
    "C": {"arrival_s": 12.9, "prompt_len": 8},
    "D": {"arrival_s": 12.8, "prompt_len": 70},
    "E": {"arrival_s": 0.0, "service_s": 0.16, "prompt_len": 20, "num_generated": 15, "num_swapped": 34},
}
_FULL = {"now": 13.0, "num_blocks": 5, "num_free_host": 1000}


def _decide(rows: _Rows, worker: dict[str, Any], **config: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    return decision_of("fastserve", rows, {"runtime": _RUNTIME, **config}, **worker)


def _queue(prefill: float, service: float, num_promotions: int = 0) -> int:
    """Return the queue by times in quanta of the first of five."""
    arrays = (np.array([value], np.float64) for value in (prefill, service, num_promotions))
    return int(queue_of(*arrays, num_queues=5)[0])


def test_the_example_of_its_page() -> None:
    assert _decide(_EXAMPLE, _FULL) == ({"C": 8, "E": 1, "B": 1}, [("A", "swap")])


@each(
    ("prefill", "queue"), [(0.2, 0), (1.0, 0), (1.1, 1), (2.0, 1), (3.0, 2), (4.0, 2), (8.0, 3), (9.0, 4), (500.0, 4)]
)
def test_a_request_joins_the_first_queue_whose_quantum_covers_its_prefill(prefill: float, queue: int) -> None:
    assert _queue(prefill, 0.0) == queue


@each(
    ("service", "queue"), [(0.9, 0), (1.0, 1), (2.9, 1), (3.0, 2), (6.9, 2), (7.0, 3), (14.9, 3), (15.0, 4), (99.0, 4)]
)
def test_who_joined_the_first_queue_sinks_with_each_quantum(service: float, queue: int) -> None:
    assert _queue(1.0, service) == queue


@each(("service", "queue"), [(3.9, 2), (4.0, 3), (11.9, 3), (12.0, 4)])
def test_who_skipped_queues_begins_with_the_quantum_it_joined(service: float, queue: int) -> None:
    assert _queue(3.0, service) == queue


@each(("service", "num_promotions", "queue"), [(0.0, 1, 0), (15.9, 1, 0), (16.0, 1, 1), (30.0, 1, 4), (30.0, 2, 0)])
def test_a_promotion_pays_for_one_way_down(service: float, num_promotions: int, queue: int) -> None:
    assert _queue(500.0, service, num_promotions) == queue


def test_equals_do_not_displace_each_other() -> None:
    rows = {
        "resident": {"arrival_s": 5.0, "prompt_len": 60, "num_generated": 1},
        "earlier": {"arrival_s": 4.0, "prompt_len": 60},
    }
    assert _decide(rows, {"now": 6.0, "num_blocks": 4, "num_free_host": 1000}) == ({"resident": 1}, [])


def test_a_promotion_that_is_further_away_than_the_turn_is_not_waited_for() -> None:
    """Both are in the last queue and run after the newcomer's quantum of 10 ms, long before either is promoted."""
    rows = {
        "earlier": {"arrival_s": 0.0, "service_s": 2.2, "prompt_len": 30, "num_generated": 4},  # promoted in 0.2 s
        "later": {"arrival_s": 1.0, "service_s": 1.1, "prompt_len": 30, "num_generated": 4},  # promoted in 0.1 s
        "new": {"arrival_s": 12.0, "prompt_len": 8},
    }
    assert _decide(rows, {"now": 12.0, "num_blocks": 6, "num_free_host": 1000}) == (
        {"new": 8, "earlier": 1},
        [("later", "swap")],
    )


def test_a_paused_cache_leaves_ahead_of_need_where_the_pass_hides_it() -> None:
    """One place, two of eight blocks to be kept free: the last queue's cache is copied beside the prompt."""
    rows = {
        "new": {"arrival_s": 5.0, "prompt_len": 10},
        "paused": {"arrival_s": 0.0, "service_s": 0.5, "prompt_len": 92, "num_generated": 3},
    }
    settings = {"now": 5.0, "num_blocks": 8, "num_free_host": 1000, "max_running_requests": 1}
    assert _decide(rows, settings, watermark=0.25) == ({"new": 10}, [("paused", "swap")])
    assert _decide(rows, settings, watermark=0.125)[1] == []


def test_without_a_quantum_the_shortest_decode_is_one() -> None:
    """EasyCosts: 11 ms and context; a prompt of 10 tokens is computed in fewer, one of 30 in more."""
    rows = {"longer": {"arrival_s": 0.0, "prompt_len": 30}, "short": {"arrival_s": 1.0, "prompt_len": 9}}
    view = view_of(rows, now=1.0)
    assert list(scheduled_of(view, make_policy("fastserve").plan(view))) == ["short", "longer"]

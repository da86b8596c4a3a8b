"""The queue before the prefill workers, the orders it can have, and names in the order of a rank."""

from contextlib import closing
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, Slo
from router.policies import make_prefill_order
from router.policies.prefill_order import FcfsOrder, LeastSlackOrder
from router.prefill_queue import PrefillQueue
from router.ranking import Ranking
from tests.support.marks import each
from tests.support.samples import R1, R2, request


def order_of(queue: PrefillQueue, *requests: Request) -> list[RequestId]:
    for one in requests:
        queue.push(one, one.prompt_len)
    return drained(queue)


def drained(queue: PrefillQueue) -> list[RequestId]:
    taken = []
    while (request_id := queue.pop_if(lambda _: True)) is not None:
        taken.append(request_id)
    return taken


DOCUMENT = request("document", arrival_s=100.0, request_class=RequestClass.BEST_EFFORT)


@each(("arrival_s", "first"), [(158.9, "chat"), (159.1, "document")])
def test_least_slack_as_in_its_docstring(arrival_s: float, first: str) -> None:
    chat = request("chat", arrival_s=arrival_s)
    assert order_of(PrefillQueue(LeastSlackOrder()), DOCUMENT, chat)[0] == first


def test_least_slack_goes_by_a_requests_own_objective() -> None:
    patient = request("patient", arrival_s=0.0, slo=Slo(ttft_s=30.0))
    assert order_of(PrefillQueue(LeastSlackOrder()), patient, request("chat", arrival_s=20.0)) == ["chat", "patient"]
    assert LeastSlackOrder().key(patient) == (30.0,)


def line(name: str, deadline_s: float, arrival_s: float = 100.0) -> Request:
    slo = Slo(deadline_s=deadline_s)
    return request(name, arrival_s=arrival_s, request_class=RequestClass.BEST_EFFORT, slo=slo)


def test_lines_go_by_their_deadlines() -> None:
    late, soon = line("late", 300.0), line("soon", 20.0, arrival_s=150.0)
    assert order_of(PrefillQueue(LeastSlackOrder()), late, soon) == ["soon", "late"]


@each(("arrival_s", "first"), [(178.9, "chat"), (179.1, "line")])
def test_a_lines_deadline_never_brings_it_nearer_to_passing_chat(arrival_s: float, first: str) -> None:
    chat = request("chat", arrival_s=arrival_s)
    assert order_of(PrefillQueue(LeastSlackOrder()), line("line", 20.0), chat)[0] == first
    assert LeastSlackOrder().key(line("line", 0.001)) > LeastSlackOrder().key(DOCUMENT)


def test_a_deadline_a_week_away_does_not_starve_a_line() -> None:
    assert LeastSlackOrder().key(line("line", 7 * 86_400.0)) == (100.0 + 60.0 + 600.0,)


def test_chat_with_a_deadline_gets_its_first_token_before_it() -> None:
    assert LeastSlackOrder().key(request(arrival_s=5.0, slo=Slo(deadline_s=0.5))) == (5.5,)


def test_a_step_of_priority_is_worth_ten_seconds() -> None:
    keys = [LeastSlackOrder().key(request(arrival_s=5.0, priority=priority)) for priority in (-1, 0, 2)]
    assert keys == [(-4.0,), (6.0,), (26.0,)]


def test_fcfs_looks_at_arrival_only() -> None:
    urgent = request("urgent", arrival_s=101.0, slo=Slo(ttft_s=0.1), priority=-9)
    assert order_of(PrefillQueue(FcfsOrder()), urgent, DOCUMENT) == ["document", "urgent"]


def test_ties_are_broken_by_arrival_then_id() -> None:
    early = request("z", arrival_s=0.5, slo=Slo(ttft_s=1.5))
    twins = [request("b", arrival_s=1.0), request("a", arrival_s=1.0)]
    assert order_of(PrefillQueue(LeastSlackOrder()), *twins, early) == ["z", "a", "b"]


def test_no_request_overtakes_the_first() -> None:
    queue = PrefillQueue(FcfsOrder())
    queue.push(request("r1", prompt_len=100), 100)
    queue.push(request("r2", prompt_len=1, arrival_s=1.0), 1)
    assert queue.pop_if(lambda waiting: waiting.num_tokens <= 50) is None
    assert len(queue) == 2
    assert drained(queue) == [R1, R2]


def test_tokens_are_counted_in_and_out() -> None:
    queue = PrefillQueue(FcfsOrder())
    queue.push(request("r1"), 7)
    queue.push(request("r2"), 5)
    assert (len(queue), queue.num_tokens) == (2, 12)
    queue.discard(R1)
    queue.discard(R1)
    assert (len(queue), queue.num_tokens) == (1, 5)
    assert drained(queue) == [R2]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_an_unknown_order_fails_listing_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"router\.prefill_order: unknown order 'lifo'; known: fcfs, least_slack"):
        make_prefill_order("lifo")


@each(("order", "num_tokens"), [(LeastSlackOrder(), 4), (FcfsOrder(), 13)])
def test_the_tokens_until_real_time_is_done(order: LeastSlackOrder | FcfsOrder, num_tokens: int) -> None:
    queue = PrefillQueue(order)
    queue.push(DOCUMENT, 9)
    assert queue.num_tokens_until_real_time_is_done == 0
    queue.push(request("r1"), 4)
    assert queue.num_tokens_until_real_time_is_done == num_tokens
    queue.discard(R1)
    queue.discard(R1)
    assert (queue.num_tokens_until_real_time_is_done, queue.num_tokens) == (0, 9)


CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.integers(0, 5))), max_size=300)


def test_ranks_that_change_for_ever_take_no_memory() -> None:
    ranking: Ranking[int] = Ranking()
    for number in range(10_000):
        ranking.put(f"worker-{number % 4}", number)
    assert len(ranking._heap) < 100


@given(CHANGES, st.integers(0, 9))
def test_names_come_in_order_and_keep_their_ranks(changes: list[tuple[str, int | None]], num_taken: int) -> None:
    ranking: Ranking[int] = Ranking()
    plain = {name: rank for name, rank in changes if rank is not None}
    for name, rank in plain.items():
        ranking.put(name, rank)
    in_order = [name for _, name in sorted((rank, name) for name, rank in plain.items())]
    with closing(ranking.in_order()) as names:
        assert list(islice(names, num_taken)) == in_order[:num_taken]
    assert list(ranking.in_order()) == in_order

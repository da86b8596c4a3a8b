"""The queue before the prefill workers, the orders it can have, and names in the order of a rank."""

from contextlib import closing
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, Slo
from router.policies import FcfsByClassOrder, FcfsOrder, LeastSlackOrder, make_prefill_order
from router.prefill_queue import PrefillQueue
from router.state import Ranking
from tests.support.marks import each
from tests.support.samples import R1, R2, request


def order_of(queue: PrefillQueue, *requests: Request, now: float = 0.0) -> list[RequestId]:
    for one in requests:
        queue.push(one, one.prompt_len)
    return drained(queue, now)


def drained(queue: PrefillQueue, now: float = 0.0) -> list[RequestId]:
    taken = []
    while turns := queue.turns(now):
        taken.append(turns[0].request_id)
        queue.take(taken[-1], now)
    return taken


DOCUMENT = request("document", arrival_s=100.0, request_class=RequestClass.BEST_EFFORT)


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


def test_a_deadline_a_week_away_does_not_starve_a_line() -> None:
    assert LeastSlackOrder().key(line("line", 7 * 86_400.0)) == (100.0 + 600.0,)


# --- classes


def chat(name: str, arrival_s: float, num_tokens: int = 10) -> Request:
    return request(name, arrival_s=arrival_s, prompt_len=num_tokens, slo=Slo(ttft_s=1.0))


def test_no_document_passes_chat_however_long_it_waits() -> None:
    old, overdue = line("old", 0.001, arrival_s=0.0), request("older", request_class=RequestClass.BEST_EFFORT)
    order = order_of(PrefillQueue(LeastSlackOrder()), old, overdue, chat("chat", 5_000.0), now=5_000.0)
    assert order == ["chat", "old", "older"]


def test_chat_that_is_late_goes_after_chat_that_is_not_and_before_documents() -> None:
    queue = PrefillQueue(LeastSlackOrder())
    queue.push(DOCUMENT, 4)
    for one in (chat("late", 100.0), chat("on time", 101.5)):
        queue.push(one, 4, due_s=one.arrival_s + 1.0)
    queue.push(chat("resumed", 90.0), 4)  # it has had its first token
    order = ["resumed", "on time", "late", "document"]
    assert [queue.num_before(RequestId(name), 102.0) for name in order] == [0, 1, 2, 3]
    assert drained(queue, 102.0) == order


@pytest.mark.parametrize(
    ("waited_s", "others_s", "place"), [(1.9, 0.0, 30), (2.1, 0.0, 19), (2.1, 5.0, 30), (10.1, 5.0, 19)]
)
def test_chat_that_waits_twice_its_objective_and_twice_what_others_wait_has_a_floor(
    waited_s: float, others_s: float, place: int
) -> None:
    queue, now = PrefillQueue(LeastSlackOrder()), 100.0 + waited_s
    for number in range(80):
        queue.push(chat(f"before{number}", 100.0 - others_s), 10, due_s=500.0)
    drained(queue, 100.0)
    late = chat("late", 100.0)
    queue.push(late, 10, due_s=101.0)
    for number in range(30):
        queue.push(chat(f"chat{number:02}", now - others_s), 10, due_s=500.0)
    order = drained(queue, now)
    assert order.index(late.request_id) == place  # 190 tokens of others owe it 190 * 0.05 / 0.95


def test_documents_have_the_floor_while_chat_waits() -> None:
    queue = PrefillQueue(LeastSlackOrder(), floor=0.2)
    queue.push(DOCUMENT, 20)
    for number in range(12):
        queue.push(chat(f"chat{number:02}", float(number)), 10)
    order = drained(queue)
    assert order.index(RequestId("document")) == 8  # 80 tokens of chat owe it 80 * 0.2 / 0.8


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=60), st.data())
def test_what_is_told_to_be_ahead_leaves_before(waiting: list[tuple[bool, int]], data: st.DataObject) -> None:
    queue, sizes = PrefillQueue(LeastSlackOrder(), floor=0.2), {}
    for number, (is_chat, num_tokens) in enumerate(waiting):
        one = chat(f"r{number}", float(number)) if is_chat else line(f"r{number}", 300.0, arrival_s=float(number))
        queue.push(one, num_tokens)
        sizes[one.request_id] = num_tokens
    own = data.draw(st.sampled_from(sorted(sizes)))
    ahead = queue.ahead_of(own, 0.0)
    order = drained(queue)
    left = sum(sizes[one] for one in order[: order.index(own)])
    assert ahead is not None
    assert ahead.num_tokens == pytest.approx(left, abs=2 * max(sizes.values()) / 0.2)  # requests leave whole
    assert queue.ahead_of(own, 0.0) is None


def test_a_document_behind_chat_without_end_has_its_turn_by_the_floor() -> None:
    queue = PrefillQueue(LeastSlackOrder(), floor=0.2)
    queue.push(line("first", 100.0), 30)
    queue.push(line("second", 200.0), 10)
    for number in range(100):
        queue.push(chat(f"chat{number}", float(number)), 10)
    # 40 tokens of documents at one fifth: 160 of chat before them.
    assert queue.ahead_of(RequestId("second"), 0.0) == (101, 190.0, 190.0)
    assert queue.ahead_of(RequestId("chat99"), 0.0) == (99, 990.0 + 40.0, None)


def test_a_document_behind_little_chat_may_come_sooner_than_the_floor_says() -> None:
    queue = PrefillQueue(LeastSlackOrder(), floor=0.2)
    queue.push(DOCUMENT, 50)
    queue.push(chat("chat", 0.0), 10)
    assert queue.ahead_of(DOCUMENT.request_id, 0.0) == (1, 10.0, 200.0)


def test_the_floor_does_not_hold_up_chat_where_its_document_finds_no_room() -> None:
    queue = PrefillQueue(LeastSlackOrder(), floor=0.5)
    queue.push(DOCUMENT, 10)
    for number in range(3):
        queue.push(chat(f"chat{number}", float(number)), 10)
    assert queue.turns(0.0) == (("chat0", False),)
    queue.take(RequestId("chat0"), 0.0)
    assert queue.turns(0.0) == (("document", True), ("chat1", False))
    queue.take(RequestId("chat1"), 0.0)
    queue.take(RequestId("document"), 0.0)  # it is owed no more than one document's tokens
    assert queue.turns(0.0) == (("chat2", False),)


def test_chat_with_a_deadline_gets_its_first_token_before_it() -> None:
    assert LeastSlackOrder().key(request(arrival_s=5.0, slo=Slo(deadline_s=0.5))) == (5.5,)


def test_a_step_of_priority_is_worth_ten_seconds() -> None:
    keys = [LeastSlackOrder().key(request(arrival_s=5.0, priority=priority)) for priority in (-1, 0, 2)]
    assert keys == [(-4.0,), (6.0,), (26.0,)]


def test_fcfs_looks_at_arrival_only() -> None:
    urgent = request("urgent", arrival_s=101.0, slo=Slo(ttft_s=0.1), priority=-9)
    assert order_of(PrefillQueue(FcfsOrder()), urgent, DOCUMENT) == ["document", "urgent"]


def test_fcfs_by_class_looks_at_class_and_arrival_only() -> None:
    urgent = request("urgent", arrival_s=101.5, slo=Slo(ttft_s=0.1), priority=-9)
    order = order_of(PrefillQueue(FcfsByClassOrder()), urgent, request("chat", arrival_s=101.0), DOCUMENT)
    assert order == ["chat", "urgent", "document"]


def test_ties_are_broken_by_arrival_then_id() -> None:
    early = request("z", arrival_s=0.5, slo=Slo(ttft_s=1.5))
    twins = [request("b", arrival_s=1.0), request("a", arrival_s=1.0)]
    assert order_of(PrefillQueue(LeastSlackOrder()), *twins, early) == ["z", "a", "b"]


def test_no_request_overtakes_the_first() -> None:
    queue = PrefillQueue(FcfsOrder())
    queue.push(request("r1", prompt_len=100), 100)
    queue.push(request("r2", prompt_len=1, arrival_s=1.0), 1)
    assert queue.turns(0.0) == ((R1, False),)
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


def test_a_request_that_left_and_came_again_is_there_once_with_its_new_length() -> None:
    queue = PrefillQueue(FcfsOrder())
    queue.push(request("r1"), 7)
    queue.discard(R1)
    queue.push(request("r1"), 9)
    assert (queue.num_tokens, queue.num_before(R1, 0.0)) == (9, 0)
    assert drained(queue) == [R1]


def test_an_unknown_order_fails_listing_the_valid_ones() -> None:
    message = r"router\.prefill_order: unknown order 'lifo'; known: .*fcfs_classed, least_slack"
    with pytest.raises(ConfigError, match=message):
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

"""The order of candidates where classes are known: chat first, in batches of its own or beside what runs."""

import math

import msgspec
import pytest

from alignedserve.core.ids import BatchId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.caches import BatchGranted
from alignedserve.messages.fields import NO_BATCH
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.batch_order import BatchOrder, HeldCapacity, SwitchLimits, WaitingBatch, waiting_batch
from tests.support.samples import handoff, request


def candidate(name: str, batch: int, prompt_len: int = 4, granted_s: float = 0.0) -> Candidate:
    """Return a candidate: c is a chat, d a document."""
    request_class = RequestClass.BEST_EFFORT if name.startswith("d") else RequestClass.REAL_TIME
    own = handoff(request(name, prompt_len, request_class=request_class), 1)
    return Candidate.of_handoff(own, BatchId(batch), granted_s)


def order(*batches: tuple[int, bool, int], floor: float | None = 0.0, late_at_s: float = math.inf) -> BatchOrder:
    """Build an order in which these wait: their numbers, whether they are documents', and their requests."""
    made = BatchOrder(SwitchLimits(min_requests=3, low_running=3, starvation_s=2.0, best_effort_floor=floor))
    for batch, is_best_effort, count in batches:
        made.granted(WaitingBatch(BatchId(batch), True, count, 0.0, is_best_effort, late_at_s))
    return made


def names(chosen: list[Candidate]) -> str:
    return " ".join(one.request.request_id for one in chosen)


FULL, SOON = 9, 0.5  # documents run and fill the worker


def test_a_batch_of_chats_goes_before_a_batch_of_documents_that_came_before() -> None:
    made = order((1, True, 2), (2, False, 2))
    waiting = [candidate("d1", 1), candidate("d2", 1), candidate("c1", 2), candidate("c2", 2)]
    assert names(made.choose(waiting, FULL, SOON)) == "c1 c2"
    assert {one.batch_id for one in waiting[2:]} == {NO_BATCH}  # beside the running batch, which stays as aligned
    assert [one.batch_id for one in waiting[:2]] == [BatchId(1), BatchId(1)]


def test_documents_that_run_do_not_make_a_worker_full_for_chat_and_chats_do() -> None:
    waiting = [candidate("c1", 2)]
    assert names(order((2, False, 1)).choose(waiting, 9, 0.5, real_time=HeldCapacity(2, 2))) == "c1"
    assert names(order((2, False, 1)).choose([candidate("c1", 2)], 9, 0.5, real_time=HeldCapacity(3, 3))) == ""
    assert names(order((2, False, 1)).choose([candidate("c1", 2)], 9, 2.0, real_time=HeldCapacity(3, 3))) == "c1"


@pytest.mark.parametrize("running", [3, 9], ids=["chats run", "documents too"])
def test_a_chat_whose_next_token_is_late_waits_no_longer_for_what_runs(running: int) -> None:
    """One of thousands had its second token after 2.6 s, where 0.1 s was its objective: it waited to be starved."""
    made, held = order((2, False, 1), late_at_s=0.1), HeldCapacity(3, 3)
    waiting = [candidate("c1", 2)]
    assert names(made.choose(waiting, running, 0.09, real_time=held)) == ""
    assert names(made.choose(waiting, running, 0.1, real_time=held)) == "c1"
    paper = order((2, False, 1), floor=None, late_at_s=0.1)
    assert names(paper.choose([candidate("c1", 2)], running, 0.1)) == ""  # where alignment goes first


def test_chats_alone_are_batched_as_without_classes() -> None:
    limits = SwitchLimits(min_requests=3, low_running=3, starvation_s=2.0, best_effort_floor=0.05)
    made = BatchOrder(limits, lambda lengths: len(lengths) == 3)
    for batch in (1, 2):
        made.granted(WaitingBatch(BatchId(batch), True, 3, 0.0))
    first, second = ([candidate(f"c{batch}{number}", batch) for number in range(3)] for batch in (1, 2))
    made.choose([*first, *second], 0, 0.0)
    assert (
        names(made.choose(second, 3, 0.1, real_time=HeldCapacity(3, 3))) == "c20 c21 c22"
    )  # costs nothing beside those
    assert made.running_id == BatchId(1)


def test_a_full_batch_of_chats_replaces_what_runs() -> None:
    made = order((2, False, 3))
    assert names(made.choose([candidate(f"c{number}", 2) for number in range(3)], FULL, SOON)) == "c0 c1 c2"
    assert (made.running_id, made.is_switching) == (BatchId(2), True)


def test_candidates_of_the_running_batch_enter_by_class() -> None:
    made = order((1, True, 2))
    made.choose([candidate("d1", 1), candidate("d2", 1)], 0, 0.0)
    assert names(made.choose([candidate("d1", 1), candidate("c1", 0), candidate("d2", 1)], 0, 0.0)) == "c1 d1 d2"


def test_a_chat_that_comes_straight_here_passes_none_that_came_in_a_batch_before() -> None:
    """Those of the running batch waited for fifteen minutes: others came straight from prefill workers all the time."""
    made = order((1, False, 2))
    of_batch = [candidate("c1", 1), candidate("c2", 1)]
    made.choose(of_batch, 0, 0.0)
    straight = candidate("c3", NO_BATCH, granted_s=5.0)
    assert names(made.choose([straight, *of_batch], 1, 5.0, real_time=HeldCapacity(1, 1))) == "c1 c2 c3"


def test_documents_wait_while_a_batch_of_chats_does() -> None:
    made = order((1, False, 3), (2, True, 3))
    waiting = [candidate("c1", 1), candidate("d1", 2)]
    assert names(made.choose(waiting, 9, 0.5, real_time=HeldCapacity(9, 9))) == ""
    assert names(made.choose(waiting, 9, 3.0, real_time=HeldCapacity(9, 9))) == "c1 d1"  # both have waited
    assert names(order((2, True, 3)).choose(waiting[1:], 9, 3.0, real_time=HeldCapacity(9, 9))) == "d1"


def test_a_document_enters_first_when_its_floor_has_made_up_its_tokens() -> None:
    made = order((1, True, 1), floor=0.5)
    document, chat = candidate("d1", 1, prompt_len=6), candidate("c1", 0, prompt_len=4)
    assert names(made.choose([document, chat], FULL, SOON)) == "c1"
    made.entered(chat)
    assert (names(made.choose([document, chat], FULL, SOON)), made.by_floor) == ("c1", None)
    made.entered(chat)
    assert (names(made.choose([document, chat], FULL, SOON)), made.by_floor) == ("d1 c1", "d1")
    made.entered(document)
    assert (names(made.choose([document, chat], FULL, SOON)), made.by_floor) == ("c1 d1", None)


def test_a_batch_is_of_documents_if_all_of_it_is() -> None:
    document = handoff(request("d1", request_class=RequestClass.BEST_EFFORT, slo=Slo(tpot_s=0.05)), 1)
    mixed = waiting_batch(BatchId(1), BatchGranted(BatchId(1), (document, handoff(request("c1"), 2))), 4.0)
    assert (mixed.is_best_effort, mixed.num_requests, mixed.granted_s) == (False, 2, 4.0)
    alone = waiting_batch(BatchId(1), BatchGranted(BatchId(1), (document,)), 4.0)
    assert (alone.is_best_effort, alone.late_at_s) == (True, math.inf)


def test_a_batch_is_late_when_the_next_token_of_its_first_chat_is() -> None:
    chats = [handoff(request(f"c{number}", slo=Slo(tpot_s=tpot_s)), number) for number, tpot_s in ((1, 0.5), (2, 0.2))]
    begun = msgspec.structs.replace(chats[1], begun_s=0.05)
    assert waiting_batch(BatchId(1), BatchGranted(BatchId(1), (chats[0], begun)), 4.0).late_at_s == 4.15
    back = msgspec.structs.replace(begun, generated_token_ids=(7, 8))  # when it had its last token is not known
    assert waiting_batch(BatchId(1), BatchGranted(BatchId(1), (back,)), 4.0).late_at_s == 4.2

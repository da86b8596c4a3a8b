"""Where requests stand: their place in the queue, when their turn is likely to be, and what is not known."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.events import Received, Ticked
from alignedserve.messages.gateways import ResumeRequest
from alignedserve.messages.request_notes import MAX_STANDINGS, RequestsNoted, Standing, Step
from alignedserve.messages.workers import PrefillCompleted
from router.request_notes import RouterNotes, standings_of
from tests.harnesses.router import RouterHarness, connected_router, decoding, pooled, prefilling
from tests.support.marks import each
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, request

FLEX = RequestClass.BEST_EFFORT


def busy_router() -> RouterHarness:
    """Its worker has all that it may be given; three documents and a chat wait behind it."""
    made = connected_router(max_prefill_tokens_per_worker=10)
    made.submit(request("running", prompt_len=10, slo=Slo(ttft_s=5.0)))
    for number in range(3):
        made.submit(request(f"document{number}", prompt_len=4, request_class=FLEX, arrival_s=float(number)))
    made.submit(request("chat", prompt_len=6, slo=Slo(ttft_s=5.0)))
    return made


def standing_of(made: RouterHarness, name: str) -> Standing | None:
    return next(iter(standings_of(made.logic.records, (RequestId(name),), made.now)), None)


def test_nothing_is_estimated_before_anything_was_measured() -> None:
    standing = standing_of(busy_router(), "document2")
    assert standing is not None
    assert (standing.stage, standing.num_before, standing.start_s) == (Stage.QUEUED, 3, None)


def test_the_estimate_follows_from_the_tokens_before_and_the_speed_that_was_measured() -> None:
    made = busy_router()
    for number, now in enumerate((2.0, 4.0), 1):  # every two seconds ten tokens leave the queue
        made.now = now
        made.submit(request(f"next{number}", prompt_len=10, slo=Slo(ttft_s=0.5), arrival_s=now))
        given = made.logic.records.placement.workers[PREFILL].prefilling
        first = next(iter(given))
        made.hear(PREFILL, PrefillCompleted(first, given[first].attempt, 10))
    chat, document = standing_of(made, "chat"), standing_of(made, "document1")
    assert chat is not None
    assert document is not None
    assert (chat.num_before, chat.start_s, chat.latest_start_s) == (0, 0.0, None)
    # A chat of 6 and a document of 4 tokens at 5 tokens/s; if chat never ceased, 8 tokens at a twentieth, less what
    # 20 tokens of chat have given them already.
    assert (document.num_before, document.num_tokens_before, document.start_s) == (2, 10, 2.0)
    owed = 20 * 0.05 / 0.95
    assert document.latest_start_s == pytest.approx((4 + (8 - owed) * 0.95 / 0.05) / 5.0)


def test_what_left_before_anything_waited_is_no_speed_of_the_queue() -> None:
    made = connected_router(max_prefill_tokens_per_worker=40)
    for number in range(14):  # ten find room at once
        made.submit(request(f"document{number:02}", prompt_len=4, request_class=FLEX, arrival_s=float(number)))
        made.now += 0.01
    first = standing_of(made, "document10")
    assert first is not None
    assert (first.num_before, first.start_s) == (0, None)
    made.now = 8.0
    given = made.logic.records.placement.workers[PREFILL].prefilling
    made.hear(PREFILL, PrefillCompleted(RequestId("document00"), given[RequestId("document00")].attempt, 4))
    last = standing_of(made, "document13")
    assert last is not None
    assert last.start_s == pytest.approx(2 * 8.0, rel=0.03)  # one in eight seconds


@each(
    ("made", "expected"),
    [
        (prefilling(), Standing(R1, Stage.PREFILLING, PREFILL)),
        (pooled(), Standing(R1, Stage.POOLED, POOL)),
        (decoding(), Standing(R1, Stage.DECODING, DECODE)),
    ],
)
def test_elsewhere_the_place_is_told_and_no_number_is_made_up(made: RouterHarness, expected: Standing) -> None:
    assert standing_of(made, R1) == expected


def test_who_else_is_at_the_place_is_told() -> None:
    made = prefilling()
    made.submit(request("r2"))
    standing = standing_of(made, R1)
    assert standing is not None
    assert (standing.num_others, standing.num_tokens_before) == (1, 4)


def test_what_the_router_does_not_have_it_tells_nothing_of() -> None:
    made = decoding()
    assert standing_of(made, "unknown") is None
    made.lose(DECODE)
    assert standing_of(made, R1) == Standing(R1, Stage.QUEUED)


@each(("made", "is_noted"), [(prefilling(), False), (RouterHarness(), True)])
def test_only_what_has_come_back_to_the_queue_is_noted_there(made: RouterHarness, is_noted: bool) -> None:
    notes, asked = RouterNotes(made.logic.records), Received(GATEWAY, ResumeRequest(request(), ()))
    notes.observe(asked, made.now, made.logic.on_event(asked, made.now))
    messages = [sent.message for sent in notes.observe(Ticked(), made.now, [])]
    noted = [note.step for message in messages if isinstance(message, RequestsNoted) for note in message.notes]
    assert noted == [Step.QUEUED] * is_noted


def test_a_question_about_many_is_answered_for_the_first_few() -> None:
    made = busy_router()
    for number in range(40):
        made.submit(request(f"more{number:02}", prompt_len=4, request_class=FLEX))
    names = tuple(RequestId(f"more{number:02}") for number in range(40))
    assert len(standings_of(made.logic.records, names, 0.0)) == MAX_STANDINGS

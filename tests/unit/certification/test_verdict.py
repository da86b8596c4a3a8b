"""Figures of a certificate, and the bounds on them."""

import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from alignedserve.core.errors import ConfigError
from lab.certification.certificate import Certificate, certificate_of
from lab.certification.judged_lines import LineAnswer, LineJudge, read_answer
from lab.certification.page import certificate_page
from lab.certification.protocol import Fitting, Lengths, Phase, Speed, Wanted, default_slo, lengthened, scaled
from lab.certification.records import BatchRecord, Evidence
from lab.certification.statistics import figures_of, wilson
from lab.certification.verdict import Bounds, Check, checks_of
from lab.certification.words import measured_of
from tests.unit.certification.samples import PROTOCOL, SLO, SPEED, batch, chat, evidence, phase


def _missed(seen: Evidence, bounds: Bounds | None = None) -> list[str]:
    checks = checks_of(seen, figures_of(seen, SLO), bounds or Bounds())
    return [check.name for check in checks if not check.holds]


def test_everything_holds() -> None:
    assert _missed(evidence()) == []


def test_one_late_chat_of_ten_is_ten_points() -> None:
    seen = evidence(beside=(chat(),) * 9 + (chat(ttft_s=1.5),))
    assert figures_of(seen, SLO).attainment_loss() == pytest.approx(0.1)
    assert _missed(seen) == ["attainment lost beside documents"]
    assert _missed(seen, Bounds(max_attainment_loss=10.0)) == []


def test_a_first_token_that_never_came_is_later_than_any() -> None:
    seen = evidence(beside=(chat(),) * 9 + (chat(ttft_s=None, failure="http 503"),))
    figures = figures_of(seen, SLO)
    assert figures.beside is not None
    assert figures.beside.latest_of_objective == math.inf
    assert "latest first token, by its objective" in _missed(seen)


def test_what_chat_leaves_over() -> None:
    left = figures_of(evidence(), SLO).left_over
    assert left is not None
    assert left.alone_tokens_per_s == pytest.approx(4000 / 20)
    assert left.chat_share == pytest.approx(10 / 5.0 / 22.0)
    assert left.left_tokens_per_s == pytest.approx(200 * 20 / 22)
    assert left.share == pytest.approx(1.0)


def test_slow_documents_miss_their_bound() -> None:
    assert _missed(evidence(beside_ended_s=30.0)) == ["documents, of what chat leaves over"]


def test_the_longest_gap_is_of_chats_with_documents_beside_them() -> None:
    stalled = replace(chat(sent_s=30.0), longest_gap_s=9.0)  # after the documents were through
    figures = figures_of(evidence(beside=(*(chat(),) * 9, stalled)), SLO)
    assert figures.beside is not None
    assert figures.beside.gap_s is not None
    assert figures.beside.gap_s.max == 0.05


def test_the_longest_gap_of_documents_is_of_all_though_their_gaps_are_a_sample() -> None:
    streams = (chat(), replace(chat(), longest_gap_s=7.0))
    record = replace(phase(Phase.DOCUMENTS_ALONE), documents=streams, document_gaps_s=(0.02, 0.05))
    figures = figures_of(Evidence((phase(Phase.CHAT_ALONE), phase(Phase.BESIDE), record), 5.0), SLO)
    assert figures.documents_alone is not None
    assert figures.documents_alone.gap_s is not None
    assert figures.documents_alone.gap_s.max == 7.0


def test_only_chats_with_documents_beside_them_count() -> None:
    chats = (*(chat(sent_s=1.0 * number) for number in range(10)), chat(sent_s=23.0, ttft_s=9.0))
    figures = figures_of(evidence(beside=chats), SLO)
    assert figures.beside is not None
    assert figures.beside.num_sent == 10
    assert figures.share_of_chats_beside == pytest.approx(10 / 11)


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"num_lost": 1}, "lines lost"),
        ({"num_doubled": 1}, "lines doubled"),
        ({"num_wrong": 1}, "lines wrong"),
        ({"failures": {"http 400": 1}}, "lines failed"),
        ({"window_s": 10.0}, "windows missed"),
        ({"status": "expired", "num_expired": 2}, "windows missed"),
    ],
)
def test_lines_and_windows(fields: dict[str, object], missed: str) -> None:
    assert _missed(evidence(batches=(batch("a", **fields), batch("b")))) == [missed]


def test_answers_of_504_are_counted_in_chats_and_lines() -> None:
    seen = evidence(batches=(batch("a", failures={"http 504": 1}), batch("b")))
    assert _missed(seen, Bounds(max_failed=1)) == ["answers of 504, or broken off"]


def test_ratios_are_bounds_where_they_are_given() -> None:
    seen = evidence(beside=(chat(tpot_s=0.05),) * 10)
    assert _missed(seen) == []
    assert _missed(seen, Bounds(max_tpot_p99_ratio=2.0)) == ["p99 of TPOT, on to off"]


def test_a_phase_that_was_not_reached_holds_nothing() -> None:
    seen = Evidence((phase(Phase.CHAT_ALONE, (chat(),), failure="nothing answers"),), chats_per_s=5.0)
    missed = _missed(seen)
    assert "phases that went to their end" in missed
    assert "lines lost" in missed
    assert "documents, of what chat leaves over" in missed


def test_intervals_of_shares() -> None:
    assert wilson(0, 0) is None
    low, high = wilson(99, 100) or (0.0, 0.0)
    assert low == pytest.approx(0.9455, abs=1e-3)
    assert high == pytest.approx(0.9982, abs=1e-3)


# The protocol of a certificate, and how it is fitted to a server.

_FULL = Wanted(burst_s=90.0, idle_s=90.0, num_bursts=4, chat=Lengths(64, 32), documents=Lengths(256, 128))


def test_chats_of_both_phases_come_at_the_same_moments_with_other_texts() -> None:
    alone, beside = PROTOCOL.chats(Phase.CHAT_ALONE), PROTOCOL.chats(Phase.BESIDE)
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in alone] == [
        (one.arrival_s, one.prompt_len, one.output_len) for one in beside
    ]
    assert not {one.text for one in alone} & {one.text for one in beside}


def test_chats_come_in_bursts_only() -> None:
    arrivals_s = [chat.arrival_s for chat in replace(PROTOCOL, rate=50.0).chats(Phase.CHAT_ALONE)]
    assert arrivals_s == sorted(arrivals_s)
    assert all(0 <= arrival_s < 5 or 10 <= arrival_s < 15 for arrival_s in arrivals_s)
    assert 400 < len(arrivals_s) < 600


def test_batches_of_both_phases_have_the_same_lengths_and_every_probe() -> None:
    beside, alone = PROTOCOL.batches(Phase.BESIDE), PROTOCOL.batches(Phase.DOCUMENTS_ALONE)
    for one, other in zip(beside, alone, strict=True):
        assert [line.request.output_len for line in one.lines] == [line.request.output_len for line in other.lines]
        assert {line.probe for line in one.lines} - {None} == {line.probe for line in other.lines} - {None}
        assert {line.probe for line in one.lines} - {None}
    ids = [line.custom_id for batch in (*beside, *alone) for line in batch.lines]
    assert len(ids) == len(set(ids))


def test_a_server_that_does_a_thousand_lines_gets_the_original_protocol() -> None:
    protocol = scaled(_FULL, Speed(0.05, 0.01, chats_per_s=37.5, documents_per_s=4.0))
    assert protocol.rate == 15.0
    assert protocol.windows_s == (1800.0, 7200.0, 86400.0)
    assert 900 < protocol.num_lines < 1100
    assert protocol.documents.output_len == 128


def test_bursts_in_which_no_chat_comes_are_refused() -> None:
    wanted = replace(_FULL, rate=0.001, burst_s=1.0, num_bursts=1)
    with pytest.raises(ConfigError, match=r"no chat comes within 1 bursts of 1 s at 0\.001 a second"):
        scaled(wanted, Speed(0.05, 0.01, chats_per_s=37.5, documents_per_s=4.0))


def test_a_faster_server_gets_longer_documents_and_a_slower_one_fewer() -> None:
    speed = Speed(0.05, 0.01, chats_per_s=100.0, documents_per_s=20.0)
    wanted = lengthened(_FULL, speed)
    assert wanted.documents.output_len > 400
    fast = scaled(wanted, replace(speed, documents_per_s=speed.documents_per_s * 128 / wanted.documents.output_len))
    assert 900 < fast.num_lines < 1100
    slow = Speed(0.05, 0.01, chats_per_s=1.0, documents_per_s=0.1)
    assert lengthened(_FULL, slow) == _FULL
    assert scaled(_FULL, slow).num_lines < 40


def test_as_many_documents_as_last_beside_chat_however_little_their_answers_cost() -> None:
    speed = Speed(0.05, 0.01, chats_per_s=100.0, documents_per_s=400.0)
    wanted = lengthened(replace(_FULL, documents=Lengths(64, 1)), speed)  # one token each: prompts are all that costs
    assert 1 < wanted.documents.output_len <= 1024
    protocol = scaled(wanted, replace(speed, documents_per_s=300.0))
    assert protocol.num_documents / 300.0 > 0.5 * protocol.chat_s


def test_fitting_ends_where_documents_are_long_enough() -> None:
    speed = Speed(0.05, 0.01, chats_per_s=100.0, documents_per_s=20.0)
    fitting = Fitting(_FULL, speed)
    documents = fitting.next_documents()
    assert documents == lengthened(_FULL, speed).documents
    fitting.measured(5.0)
    assert fitting.next_documents() is None
    longer, measured = replace(_FULL, documents=documents), replace(speed, documents_per_s=5.0)
    assert (fitting.speed, fitting.protocol) == (measured, scaled(longer, measured))


def test_documents_are_made_longer_three_times_at_most() -> None:
    fitting = Fitting(
        replace(_FULL, documents=Lengths(64, 1)), Speed(0.05, 0.01, chats_per_s=100.0, documents_per_s=10.0)
    )
    found = []
    while (documents := fitting.next_documents()) is not None:
        found.append(documents.output_len)
        fitting.measured(10.0)  # as if longer answers cost nothing
    assert found == sorted(set(found))
    assert len(found) == 3


def test_documents_of_a_given_number_are_not_made_longer() -> None:
    wanted = replace(_FULL, num_lines=100)
    assert lengthened(wanted, Speed(0.05, 0.01, chats_per_s=100.0, documents_per_s=400.0)) == wanted


def test_what_is_given_is_kept() -> None:
    wanted = replace(_FULL, rate=3.0, num_lines=7, windows_s=(60.0,), ttft_s=0.3, tpot_s=0.05)
    protocol = scaled(wanted, SPEED)
    assert (protocol.rate, protocol.num_lines, protocol.windows_s) == (3.0, 7, (60.0,))
    assert (protocol.slo.ttft_s, protocol.slo.tpot_s) == (0.3, 0.05)


def test_small_windows_are_at_least_what_servers_take() -> None:
    small = scaled(replace(_FULL, burst_s=6.0, idle_s=5.0, num_bursts=2), SPEED)
    assert small.windows_s == (60.0, 220.0, 2640.0)


def test_default_objectives_follow_the_idle_server() -> None:
    assert default_slo(_FULL, SPEED).ttft_s == 1.0
    slow = default_slo(_FULL, replace(SPEED, ttft_s=0.63, tpot_s=0.21))
    assert (slow.ttft_s, slow.tpot_s) == (3.2, 0.63)


# Lines of a batch, judged by its files.

BATCH = PROTOCOL.batches(Phase.BESIDE)[0]
PROBE = next(line.custom_id for line in BATCH.lines if line.probe is not None)
ANSWERS = [LineAnswer(line.custom_id, "right", 10, 5) for line in BATCH.lines]


def _judged(answers: list[LineAnswer | None]) -> BatchRecord:
    judge = LineJudge(BATCH, dict.fromkeys(range(8), "right"))
    for answer in answers:
        judge.take(answer)
    return judge.record("completed", 0.0, 10.0)


def test_every_line_answered_once() -> None:
    record = _judged([*ANSWERS])
    assert (record.num_answered, record.num_lost, record.num_doubled, record.num_wrong) == (20, 0, 0, 0)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (200, 100)
    assert record.has_held_window


def test_lost_doubled_and_foreign_lines() -> None:
    record = _judged([*ANSWERS[1:], ANSWERS[1], LineAnswer("another", "right"), None])
    assert (record.num_answered, record.num_lost, record.num_doubled, record.num_wrong) == (19, 1, 1, 2)


def test_a_probe_with_another_answer_than_alone_is_wrong() -> None:
    record = _judged([replace(one, text="left") if one.custom_id == PROBE else one for one in ANSWERS])
    assert record.num_wrong == 1
    assert record.wrong == (f"{PROBE}: 'left', alone 'right'",)


def test_failed_and_expired_lines_are_not_lost() -> None:
    failed, expired = ANSWERS[0].custom_id, ANSWERS[1].custom_id
    record = _judged(
        [LineAnswer(failed, failure="http 504"), LineAnswer(expired, failure="batch_expired"), *ANSWERS[2:]]
    )
    assert (record.num_answered, record.num_lost, record.num_expired) == (18, 0, 1)
    assert record.failures == {"http 504": 1}
    assert not record.has_held_window


def test_records_are_read() -> None:
    body = {"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    answered = {"custom_id": "1", "response": {"status_code": 200, "body": body}, "error": None}
    refused = {"custom_id": "2", "response": {"status_code": 400, "body": {}}, "error": None}
    expired = {"custom_id": "3", "response": None, "error": {"code": "batch_expired", "message": "x"}}
    read = [read_answer(json.dumps(record).encode()) for record in (answered, refused, expired)]
    assert read == [
        LineAnswer("1", "yes", 3, 1),
        LineAnswer("2", failure="http 400"),
        LineAnswer("3", failure="batch_expired"),
    ]
    assert [read_answer(line) for line in (b"not json", b"[]", b'{"custom_id": 3}', b"{}")] == [None] * 4


# The page of a certificate.


def _certificate(seen: Evidence, *, is_simulated: bool = False) -> Certificate:
    about = (("server", "http://server/<script>"),)
    return certificate_of(
        title="Certificate", about=about, protocol=PROTOCOL, speed=SPEED, evidence=seen, bounds=Bounds(),
        is_simulated=is_simulated,
    )  # fmt: skip


def _page(seen: Evidence, *, is_simulated: bool = False) -> str:
    page = certificate_page(_certificate(seen, is_simulated=is_simulated))
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)  # well formed
    return page


def test_a_page_says_what_holds_and_loads_nothing() -> None:
    page = _page(evidence())
    assert "Held: all 11 bounds" in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=", page)
    assert "&lt;script&gt;" in page
    headings = ("95 % interval", "gap over 2 s", "lines that had ended", "How the figures are defined")
    for words in ("TTFT, on to off", *headings):
        assert words in page


def test_a_page_names_what_does_not_hold() -> None:
    chats = (chat(),) * 9 + (chat(ttft_s=None, failure="http 503"),)
    seen = evidence(beside=chats, batches=(batch("a", num_lost=1), batch("b")))
    page = _page(seen)
    assert "Not held: 3 of 11 bounds" in page
    assert "latest first token, by its objective none came (bound at most 3 x)" in page
    assert "1 x http 503" in page


def test_a_page_whose_bounds_hold_claims_no_more_than_was_seen() -> None:
    slow = (chat(tpot_s=0.5),) * 10  # late in both phases: nothing is lost beside documents
    page = _page(evidence(alone=slow, beside=slow))
    assert "Held: all 11 bounds" in page
    assert "0.0% of chats were in time beside documents, 0.0% alone, and no line of a batch was lost." in page
    assert "Alone, 0.0% of chats were in time: the objectives are too tight" in page


def test_a_share_that_is_not_whole_never_reads_as_whole_nor_as_the_bound_that_it_misses() -> None:
    seen = evidence(beside=(chat(),) * 2999 + (chat(ttft_s=1.5),))
    assert "99.97%" in _page(seen)
    assert "100.0%" in _page(evidence())
    assert measured_of(Check("in time", 99.9967, 99.0, is_least=True, unit="%")) == "99.997 %"
    assert measured_of(Check("in time", 89.999, 90.0, is_least=True, unit="%")) == "89.999 %"
    assert measured_of(Check("lost", 0.001, 0.0, unit="points")) == "0.001 points"
    assert measured_of(Check("in time", 100.0, 99.0, is_least=True, unit="%")) == "100 %"


def test_a_simulated_page_says_which_chats_its_gaps_are_of() -> None:
    late = evidence(beside=(*(chat(),) * 9, chat(sent_s=30.0)))  # after the documents were through
    assert "Percentiles of gaps with documents on are of all chats" in _page(late, is_simulated=True)
    assert "Percentiles of gaps" not in _page(late)
    assert "Percentiles of gaps" not in _page(evidence(), is_simulated=True)


def test_a_partial_run_has_a_page() -> None:
    seen = Evidence(
        (phase(Phase.CHAT_ALONE, (chat(),), failure="nothing answers at X any more"),), 5.0, ("no batches",)
    )
    page = _page(seen)
    assert "ended early: nothing answers at X any more" in page
    assert "No phase with documents was reached." in page
    assert "no batches" in page


def test_the_json_has_figures_checks_and_every_chat() -> None:
    document = json.loads(json.dumps(_certificate(evidence()).to_builtins()))
    assert document["holds"] is True
    assert document["chat"]["TTFT"]["p99"]["ratio"] == 1.0
    assert {check["name"] for check in document["checks"]} >= {"lines lost", "answers of 504, or broken off"}
    assert len(document["phases"][0]["chats"]) == 10

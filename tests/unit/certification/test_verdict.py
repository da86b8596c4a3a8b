"""Figures of a certificate, and the bounds on them."""

import math
from dataclasses import replace

import pytest

from lab.certification.protocol import Phase
from lab.certification.records import Evidence
from lab.certification.statistics import figures_of, wilson
from lab.certification.verdict import Bounds, checks_of
from tests.unit.certification.samples import SLO, batch, chat, evidence, phase


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

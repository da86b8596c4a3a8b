"""The protocol of a certificate, and how it is fitted to a server."""

from dataclasses import replace

import pytest

from alignedserve.core.errors import ConfigError
from lab.certification.protocol import Fitting, Lengths, Phase, Speed, Wanted, default_slo, lengthened, scaled
from tests.unit.certification.samples import PROTOCOL, SPEED

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

"""The page of a certificate."""

import json
import re
from xml.etree import ElementTree

from lab.certification.certificate import Certificate, certificate_of
from lab.certification.page import certificate_page
from lab.certification.protocol import Phase
from lab.certification.records import Evidence
from lab.certification.verdict import Bounds, Check
from lab.certification.words import measured_of
from tests.unit.certification.samples import PROTOCOL, SPEED, batch, chat, evidence, phase


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

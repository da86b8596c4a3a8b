"""Terms, pieces, counters and versions of the plugin for vLLM."""

from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.request import RequestClass, Slo
from benchmarks.vllm.stand_ins import StandInRequest, StandInScheduler
from plugins.vllm import names
from plugins.vllm.counters import Counters, read_counters
from plugins.vllm.pieces import Piece, arrange
from plugins.vllm.terms import BadTerms, read_terms

DEFAULT = Slo(1.0, 0.2)


def test_terms_of_chats_and_documents() -> None:
    assert read_terms({}, 0, DEFAULT).slo == DEFAULT
    assert read_terms({"slo_tpot_ms": 50}, 0, DEFAULT).slo == Slo(1.0, 0.05)
    assert read_terms({"slo_ttft_ms": 50}, 9, DEFAULT).request_class is RequestClass.REAL_TIME
    document = read_terms({"deadline_ms": 60_000, "service_class": "document", "tenant": "a"}, 0, DEFAULT)
    assert (document.request_class, document.slo, document.tenant) == (
        RequestClass.BEST_EFFORT,
        Slo(None, None, 60.0),
        "a",
    )
    assert read_terms({}, 10**9, DEFAULT).priority == 1000


@pytest.mark.parametrize(
    ("xargs", "name"),
    [
        ({"slo_ttft_ms": "soon"}, "slo_ttft_ms"),
        ({"slo_ttft_ms": -5}, "slo_ttft_ms"),
        ({"slo_tpot_ms": 0}, "slo_tpot_ms"),
        ({"slo_tpot_ms": float("nan")}, "slo_tpot_ms"),
        ({"slo_tpot_ms": True}, "slo_tpot_ms"),
        ({"deadline_ms": 1e300}, "deadline_ms"),
        ({"deadline_ms": [1]}, "deadline_ms"),
        ({"service_class": 7}, "service_class"),
        ({"service_class": "document", "slo_tpot_ms": 5}, "slo_tpot_ms"),
        ({"tenant": "x" * 257}, "tenant"),
    ],
)
def test_terms_without_meaning_are_named(xargs: dict[str, Any], name: str) -> None:
    with pytest.raises(BadTerms, match=f"^vllm_xargs.{name} ") as caught:
        read_terms(xargs, 0, DEFAULT)
    assert len(str(caught.value)) < 200
    assert not any(
        str(value) in str(caught.value) for value in xargs.values() if len(str(value)) > 1 and value != "document"
    )


def piece(name: str, num_tokens: int, *, part: bool = False, running: bool = True) -> Piece:
    return Piece(StandInRequest(name, 100), num_tokens, part, running)


def arranged(*pieces: Piece, others: int = 0) -> tuple[list[str], list[str], int, int, int]:
    running = [each.request for each in pieces if each.is_running] + [StandInRequest(f"o{n}", 5) for n in range(others)]
    layout = arrange(list(pieces), running, [], None)
    return (
        [request.request_id for request in layout.running],
        [request.request_id for request in layout.newcomers],
        len(layout.held),
        layout.num_tokens,
        layout.most_tokens,
    )


def test_the_part_of_a_prompt_goes_last() -> None:
    assert arranged(piece("part", 7, part=True), piece("c", 1)) == (["c", "part"], [], 0, 8, 0)
    assert arranged(piece("c", 1), piece("part", 7, part=True, running=False)) == (["c"], ["part"], 0, 8, 0)


def test_a_running_part_before_newcomers_needs_a_bound_or_sits_out() -> None:
    new = piece("new", 30, running=False)
    assert arranged(piece("part", 40, part=True), new) == (["part"], ["new"], 0, 70, 40)
    assert arranged(piece("part", 20, part=True), new) == ([], ["new"], 1, 30, 0)


def test_who_is_not_in_the_plan_sits_out_behind_the_others_where_nobody_enters() -> None:
    assert arranged(piece("c", 1), others=2) == (["c", "o0", "o1"], [], 0, 1, 0)
    assert arranged(piece("c", 1), piece("new", 5, running=False), others=2) == (["c"], ["new"], 2, 6, 0)


def test_another_process_reads_the_counters(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    counters = Counters(path)
    counters.add("chats", 2)
    assert read_counters(path)["chats"] == 2.0
    counters.close()
    assert not read_counters(path)


def test_other_versions_are_refused_by_name() -> None:
    names.check_version("0.32.0+cpu")
    with pytest.raises(names.UnknownVllm, match=r"works inside vLLM 0\.32\.0; this is vLLM 0\.33\.1"):
        names.check_version("0.33.1")


def test_a_scheduler_that_lacks_a_name_is_refused() -> None:
    scheduler = StandInScheduler()
    names.check_scheduler(scheduler)
    del scheduler.running
    with pytest.raises(names.UnknownVllm, match="has no running"):
        names.check_scheduler(scheduler)

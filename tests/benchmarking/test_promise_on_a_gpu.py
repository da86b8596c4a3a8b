"""The promise on one GPU: what its figures count, and all of it at toy size on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.core.request import FinishReason
from benchmarks.gpu.chat_beside_documents import TOY, chat_figures, document_figures
from benchmarks.gpu.timed_gateway import SentRequest
from tests.harnesses.client_gateway import Answer

pytestmark = pytest.mark.slow  # as all of this folder

LOAD, WINDOW = TOY, (10.0, 20.0)


def sent(due_s: float, stamps: list[tuple[float, int]], *, is_chat: bool, answer_len: int = 3) -> SentRequest:
    """Return a request that has ended if all of its tokens have come."""
    answer = Answer(token_ids=[5] * sum(num for _, num in stamps))
    if len(answer.token_ids) == answer_len:
        answer.finish_reason = FinishReason.LENGTH
        answer.done.set()
    return SentRequest(answer, due_s, 100, answer_len, is_chat, stamps)


def test_a_chat_is_held_if_both_of_its_objectives_are() -> None:
    prompt = sent(11.0, [(11.5, 1), (11.54, 1), (11.6, 1)], is_chat=True)
    late = sent(12.0, [(13.1, 1), (13.14, 1), (13.18, 1)], is_chat=True)
    slow = sent(13.0, [(13.5, 1), (13.8, 2)], is_chat=True)
    unfinished = sent(14.0, [(14.5, 1), (14.51, 1)], is_chat=True)
    before = sent(9.9, [], is_chat=True)
    figures = chat_figures([prompt, late, slow, unfinished, before], WINDOW, LOAD)
    assert (figures["num"], figures["num_unfinished"]) == (4, 1)
    assert (figures["held"], figures["ttft_held"], figures["tpot_held"]) == (0.25, 0.75, 0.5)
    assert figures["longest_gap_s"]["max"] == pytest.approx(0.3)
    assert figures["tpot_s"]["max"] is None
    assert figures["prompt_tokens_per_s"] == 40.0


def test_documents_count_by_what_came_within_the_window() -> None:
    documents = [
        sent(0.0, [(9.0, 1), (10.0, 1), (12.0, 1)], is_chat=False),
        sent(0.0, [(15.0, 1), (25.0, 2)], is_chat=False),
        sent(0.0, [], is_chat=False),
    ]
    figures = document_figures(documents, WINDOW)
    assert (figures["output_tokens_per_s"], figures["prompt_tokens_per_s"]) == (0.3, 10.0)
    assert (figures["num_finished"], figures["num_running_at_the_end"]) == (1, 1)
    assert figures["num_waiting_at_the_end"] == 1


def test_lost_and_cut_tokens_are_seen() -> None:
    cut = sent(0.0, [(1.0, 2)], is_chat=False)
    assert not cut.is_wrong  # it is still open
    cut.answer.finish_reason = FinishReason.STOP
    cut.answer.done.set()
    assert cut.is_wrong
    assert not sent(0.0, [(1.0, 3)], is_chat=False).is_wrong


def test_chat_holds_beside_documents_on_a_toy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.parts", "promise", "--toy", "--device", "cpu"]
    command += ["--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
    figures = json.loads((tmp_path / "gpu_promise.json").read_text())["figures"]
    assert figures["is_complete"]
    assert figures["failures"] == []
    found = figures["policies"]["aligned_slo"]
    assert list(found["phases"]) == ["chat alone", "documents alone", "chat beside documents"]
    beside = found["phases"]["chat beside documents"]
    assert beside["chat"]["num"] > 0
    assert beside["documents"]["output_tokens_per_s"] > 0.0
    assert found["blocks_used_at_the_end"] == 0

"""The choice of kernels for prompts and chunks by what trials have found, and what is remembered of them."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.errors import DeviceLost
from alignedserve.runtime.attention import prompt_choice
from alignedserve.runtime.attention.libraries import (
    OWN,
)
from alignedserve.runtime.attention.prompt_choice import (
    FAR_BYTES,
    Measured,
    PromptChoice,
    PromptSetup,
    TrialRequest,
    TrialResult,
    choose_prompts,
)
from alignedserve.runtime.device import verdicts
from alignedserve.runtime.device.device_work import working
from tests.support.prompt_setups import WINDOW, layout, setup_of


class Trials:
    """What processes of their own would find out, by library; and what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.answers: dict[str, TrialResult | str] = {}
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(prompt_choice, "cache_folder", lambda: folder)
        monkeypatch.setattr(prompt_choice, "identity_of", lambda device: [device])
        monkeypatch.setattr(prompt_choice, "ask", self._ask)
        self._known = prompt_choice._known
        self._known.clear()

    def choose(self, setup: PromptSetup, *libraries: str) -> PromptChoice:
        """Choose as the first engine of a process."""
        self._known.clear()
        return choose_prompts(setup, libraries)

    def _ask(self, command: list[str], limit_s: float) -> dict[str, Any] | str:
        request = TrialRequest.from_json(command[-1])
        self.asked.append((request.library, request.setup.num_blocks))
        answer = self.answers[request.library]
        return answer if isinstance(answer, str) else asdict(answer)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    return Trials(monkeypatch, tmp_path)


FAST = TrialResult(40, Measured(2.0, 1.0), Measured(2.0, 1.5), clears_tails=True)
SLOW = TrialResult(40, Measured(4.0, 3.0), None, paged_reason="its results differ from ours by nan")


def test_the_fastest_beside_ours_is_taken_for_each_kind(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    trials.answers = {"fast": FAST, "slow": SLOW, "lost": "ended with -6: nothing was said"}
    choice = trials.choose(setup_of(), "fast", "slow", "lost")
    assert choice.whole == {OWN: 2.0, "fast": 1.0, "slow": 1.5}
    assert (choice.for_whole, choice.for_paged, choice.clears_tails) == ("fast", "fast", True)
    assert str(choice).startswith("whole prompts by fast (measured on 13 tokens: own kernel 2000.00 ms, fast 1000.00")
    assert "chunks by fast (measured on 11 tokens after 6: " in str(choice)
    assert "slow computes no chunks here: its results differ from ours by nan" in caplog.text
    assert "lost computes no prompts here: its trial, in a process of its own, ended with -6" in caplog.text


def test_what_a_trial_found_is_remembered_and_what_ended_it_is_not(trials: Trials) -> None:
    trials.answers = {"fast": FAST, "lost": "did not end within 180 s"}
    first = trials.choose(setup_of(), "fast", "lost")
    assert trials.choose(setup_of(), "fast", "lost") == first
    assert [name for name, _ in trials.asked] == ["fast", "lost", "lost"]
    trials.choose(setup_of(WINDOW), "fast")  # another engine
    assert len(trials.asked) == 4


def test_a_trial_without_the_far_offsets_decides_no_chunks(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    trials.answers = {"fast": FAST}
    near, far = setup_of(), replace(setup_of(), num_blocks=FAR_BYTES // layout().block_bytes)
    choice = trials.choose(far, "fast")
    assert (choice.for_whole, choice.for_paged) == ("fast", OWN)
    assert "fast computes no chunks here: no memory to try it at the offsets of these blocks" in caplog.text
    assert trials.choose(near, "fast").for_paged == "fast"
    trials.answers = {"fast": replace(FAST, num_blocks=far.num_blocks)}
    assert trials.choose(far, "fast").for_paged == "fast"
    trials.answers = {}
    assert trials.choose(far, "fast").for_paged == trials.choose(near, "fast").for_paged == "fast"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"num_blocks": "many"}'])
def test_a_file_that_someone_else_wrote_decides_nothing(content: bytes, trials: Trials, tmp_path: Path) -> None:
    trials.answers = {"fast": FAST}
    trials.choose(setup_of(), "fast")
    (kept,) = tmp_path.rglob("*.json")
    kept.write_bytes(content)
    assert trials.choose(setup_of(), "fast").for_paged == "fast"
    assert len(trials.asked) == 2


def test_after_the_device_has_failed_the_next_process_does_without_the_library_in_use(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verdicts, "_suspects", {})
    trials.answers = {"fast": FAST, "slow": SLOW}
    assert trials.choose(setup_of(), "fast", "slow").for_paged == "fast"
    with pytest.raises(DeviceLost), working(torch.device("cuda:0")):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    choice = trials.choose(setup_of(), "fast", "slow")
    assert (choice.for_whole, choice.for_paged) == ("slow", OWN)
    assert "fast computes no chunks here: the GPU failed while it was in use; to try it again, delete " in caplog.text

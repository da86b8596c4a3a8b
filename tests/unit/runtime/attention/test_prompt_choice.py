"""The choice of libraries for prompts and chunks by their checks, and what is remembered of these."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.errors import DeviceLost
from alignedserve.runtime.attention import libraries
from alignedserve.runtime.attention.libraries import (
    FAR_BYTES,
    FLASH_4,
    PYTORCH,
    CheckResult,
    PromptChoice,
    PromptSetup,
    best_libraries,
    choose_prompts,
)
from alignedserve.runtime.device import devices
from alignedserve.runtime.device.accelerator import working
from tests.support.prompt_setups import WINDOW, layout, setup_of


class Checks:
    """What processes of their own would find out, by library; and what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.answers: dict[str, CheckResult | str] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(libraries, "cache_folder", lambda: folder)
        monkeypatch.setattr(libraries, "identity_of", lambda device: [device])
        monkeypatch.setattr(libraries, "ask", self._ask)

    def choose(self, setup: PromptSetup, *names: str) -> PromptChoice:
        """Choose as the first engine of a process."""
        libraries._known.clear()
        return choose_prompts(setup, names)

    def _ask(self, command: list[str], limit_s: float) -> dict[str, Any] | str:
        assert PromptSetup.from_json(command[-1]).shapes == setup_of().shapes
        self.asked.append(command[-2])
        answer = self.answers[command[-2]]
        return answer if isinstance(answer, str) else asdict(answer)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checks:
    return Checks(monkeypatch, tmp_path)


GOOD = CheckResult(40, clears_tails=True)
WHOLE_ALONE = CheckResult(40, paged_reason="its results differ from ours by nan")


def test_the_first_library_that_passes_is_taken_for_each_kind(checks: Checks, caplog: pytest.LogCaptureFixture) -> None:
    checks.answers = {"lost": "ended with -6: nothing was said", "whole": WHOLE_ALONE, "good": GOOD}
    choice = checks.choose(setup_of(), "lost", "whole", "good", "never asked")
    assert choice == ("whole", "good", True)
    assert str(choice) == "whole prompts by whole; chunks by good"
    assert "whole computes no chunks here: its results differ from ours by nan" in caplog.text
    assert "lost computes no prompts here: its check, in a process of its own, ended with -6" in caplog.text
    assert str(checks.choose(setup_of(), "good")) == "prompts and chunks by good"
    assert str(checks.choose(setup_of(), "lost")) == "prompts and chunks by our own kernel"


@pytest.mark.parametrize(
    ("generation", "names"), [(7, ()), (8, (PYTORCH,)), (9, (FLASH_4, PYTORCH)), (12, (FLASH_4, PYTORCH))]
)
def test_a_table_names_the_libraries_of_a_generation(
    generation: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"major": generation}))
    assert best_libraries(torch.device("cuda:0")) == names


def test_a_result_is_remembered_and_a_crash_is_not(checks: Checks) -> None:
    checks.answers = {"lost": "did not end within 180 s", "good": GOOD}
    first = checks.choose(setup_of(), "lost", "good")
    assert checks.choose(setup_of(), "lost", "good") == first
    assert checks.asked == ["lost", "good", "lost"]
    checks.choose(setup_of(WINDOW), "good")  # another engine
    assert len(checks.asked) == 4


def test_a_check_without_the_far_offsets_decides_no_chunks(checks: Checks, caplog: pytest.LogCaptureFixture) -> None:
    checks.answers = {"good": GOOD}
    near, far = setup_of(), replace(setup_of(), num_blocks=FAR_BYTES // layout().block_bytes)
    assert checks.choose(far, "good") == ("good", None, False)
    assert "good computes no chunks here: no memory to try it at the offsets of these blocks" in caplog.text
    assert checks.choose(near, "good").paged == "good"
    checks.answers = {"good": replace(GOOD, num_blocks=far.num_blocks)}
    assert checks.choose(far, "good").paged == "good"
    checks.answers = {}
    assert checks.choose(far, "good").paged == checks.choose(near, "good").paged == "good"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"num_blocks": "many"}'])
def test_a_file_that_someone_else_wrote_decides_nothing(content: bytes, checks: Checks, tmp_path: Path) -> None:
    checks.answers = {"good": GOOD}
    checks.choose(setup_of(), "good")
    (kept,) = tmp_path.rglob("*.json")
    kept.write_bytes(content)
    assert checks.choose(setup_of(), "good").paged == "good"
    assert len(checks.asked) == 2


def test_after_the_device_has_failed_the_next_process_does_without_the_library_in_use(
    checks: Checks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_suspects", {})
    checks.answers = {"good": GOOD, "whole": WHOLE_ALONE}
    assert checks.choose(setup_of(), "good", "whole").paged == "good"
    with pytest.raises(DeviceLost), working(torch.device("cuda:0")):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert checks.choose(setup_of(), "good", "whole") == ("whole", None, False)
    assert "good computes no chunks here: the GPU failed while it was in use; to try it again, delete " in caplog.text

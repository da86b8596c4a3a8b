"""The trial of a library for prompts and chunks: what it sees of one that misbehaves; it ends no other process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention import prompt_choice
from alignedserve.runtime.attention.libraries import (
    FLASH_4,
    OWN,
    AttentionLibrary,
)
from alignedserve.runtime.attention.prompt_choice import (
    ChunkShape,
    Measured,
    PromptChoice,
    TrialResult,
    choose_prompts,
)
from tests.gpu_kernels.library_stand_ins import (
    PLAIN,
    fails,
    on_the_first_layer,
    plain_paged,
    plain_whole,
    with_narrow_offsets,
    with_stale_memory,
    without_guard,
    writing_behind,
    writing_elsewhere,
    writing_into_the_cache,
)
from tests.support.prompt_setups import SHAPES, WINDOW, setup_of

pytest.importorskip("triton")

from alignedserve.runtime.attention.library_trial import differing, fitting
from tests.gpu_kernels.tried_libraries import tried

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]


# --- the trial of one


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_that_computes_what_our_kernel_does_is_measured(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(PLAIN, monkeypatch, window) == TrialResult(40, Measured(2.0, 1.0), Measured(2.0, 1.0))


_DIFFERS, _WRITES = "its results differ from ours by ", "it writes where it should only read"


@pytest.mark.parametrize(
    ("paged", "reason"),
    [
        (fails, "RuntimeError: no kernel image is available"),
        (lambda *own: plain_paged(*own) * 1.1, _DIFFERS),
        (with_narrow_offsets, _DIFFERS),
        (on_the_first_layer, _DIFFERS),
        (with_stale_memory(), _DIFFERS),
        (writing_behind, _WRITES),
        (writing_elsewhere, _WRITES),
        (writing_into_the_cache, _WRITES),
    ],
)
def test_a_library_that_misbehaves_computes_no_chunks(
    paged: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tried(AttentionLibrary("bad", plain_whole, paged), monkeypatch)
    assert result.whole == Measured(2.0, 1.0)
    assert result.paged is None
    assert result.paged_reason.startswith(reason)


@pytest.mark.parametrize(
    ("whole", "reason"),
    [(fails, "RuntimeError: no kernel"), (lambda *own: plain_whole(*own) * float("nan"), _DIFFERS + "nan")],
)
def test_a_library_that_misbehaves_computes_no_prompts(
    whole: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tried(AttentionLibrary("bad", whole, plain_paged), monkeypatch)
    assert (result.whole, result.paged) == (None, Measured(2.0, 1.0))
    assert result.whole_reason.startswith(reason)


def test_a_library_that_reads_unused_slots_computes_chunks_where_these_hold_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = tried(AttentionLibrary("unguarded", plain_whole, without_guard), monkeypatch)
    assert result == TrialResult(40, Measured(2.0, 1.0), Measured(2.0, 1.0), clears_tails=True)


def test_shapes_shrink_to_the_blocks_there_are() -> None:
    assert fitting(ChunkShape((12, 5), (12, 1)), 4, 4) == ChunkShape((6, 2), (6, 1))
    assert fitting(ChunkShape((12, 5), (12, 1)), 4, 5) == ChunkShape((12, 5), (12, 1))


OURS = [torch.zeros(2, 3), torch.ones(2, 3)]  # of layers without a window and with one


@pytest.mark.parametrize("layer", [0, 1])
def test_results_that_are_not_numbers_are_refused_in_every_kind_of_layer(layer: int) -> None:
    theirs = [one.clone() for one in OURS]
    theirs[layer][1, 2] = float("nan")
    assert differing(lambda: theirs, OURS) == "its results differ from ours by nan"


def test_results_within_the_rounding_are_taken() -> None:
    assert differing(lambda: [one + 1e-5 for one in OURS], OURS) is None
    assert differing(lambda: [OURS[0], OURS[1] + 0.25], OURS) == "its results differ from ours by 0.25"


# --- processes of their own


CRASHING = "import os, signal\ndef flash_attn_varlen_func(*_, **__):\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
SOUND = "from tests.gpu_kernels.library_stand_ins import flash_4 as flash_attn_varlen_func\n"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(prompt_choice, "identity_of", lambda device: [device])
    monkeypatch.setattr(prompt_choice, "cache_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(prompt_choice, "_known", {})
    return tmp_path / "kept"


def install_flash_4(folder: Path, source: str) -> None:
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "cute.py").write_text(source)


def test_a_library_that_ends_its_process_ends_no_other(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_flash_4(tmp_path, CRASHING)
    assert choose_prompts(setup_of(), [FLASH_4]) == PromptChoice(shapes=SHAPES)
    assert "its trial, in a process of its own, ended with -11" in caplog.text
    assert not kept.exists()


def test_a_process_of_its_own_measures_a_library(kept: Path, tmp_path: Path) -> None:
    install_flash_4(tmp_path, SOUND)
    choice = choose_prompts(setup_of(), [FLASH_4])
    assert set(choice.whole) == set(choice.paged) == {OWN, FLASH_4}
    assert not choice.clears
    assert len(list(kept.rglob("*.json"))) == 1

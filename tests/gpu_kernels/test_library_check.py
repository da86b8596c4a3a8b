"""The check of a library for prompts and chunks: it sees faults of a library, and ends no other process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention import libraries
from alignedserve.runtime.attention.libraries import (
    FLASH_4,
    AttentionLibrary,
    CheckResult,
    ChunkShape,
    PromptChoice,
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
from tests.support.prompt_setups import WINDOW, setup_of

pytest.importorskip("triton")

from alignedserve.runtime.attention.library_check import LibraryCheck, differing, fitting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]


# --- the check of one

_DIFFERS, _WRITES = "its results differ from ours by ", "it writes where it should only read"


def reasons_of(library: AttentionLibrary, **setup: Any) -> tuple[str, str]:
    result = LibraryCheck(setup_of(**setup), library).result()
    assert result.num_blocks == 40
    assert not result.clears_tails
    return result.whole_reason, result.paged_reason


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_that_computes_what_our_kernel_does_passes(window: int | None) -> None:
    assert reasons_of(PLAIN, window=window) == ("", "")


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
def test_a_library_that_misbehaves_computes_no_chunks(paged: Callable[..., Tensor], reason: str) -> None:
    whole_reason, paged_reason = reasons_of(AttentionLibrary("bad", plain_whole, paged))
    assert not whole_reason
    assert paged_reason.startswith(reason)


@pytest.mark.parametrize(
    ("whole", "reason"),
    [(fails, "RuntimeError: no kernel"), (lambda *own: plain_whole(*own) * float("nan"), _DIFFERS + "nan")],
)
def test_a_library_that_misbehaves_computes_no_prompts(whole: Callable[..., Tensor], reason: str) -> None:
    whole_reason, paged_reason = reasons_of(AttentionLibrary("bad", whole, plain_paged))
    assert whole_reason.startswith(reason)
    assert not paged_reason


def test_a_library_that_reads_unused_slots_computes_chunks_where_these_hold_numbers() -> None:
    library = AttentionLibrary("unguarded", plain_whole, without_guard)
    assert LibraryCheck(setup_of(), library).result() == CheckResult(40, clears_tails=True)


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
    monkeypatch.setattr(libraries, "identity_of", lambda device: [device])
    monkeypatch.setattr(libraries, "cache_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(libraries, "_known", {})
    return tmp_path / "kept"


@pytest.mark.parametrize(("source", "choice"), [(CRASHING, PromptChoice()), (SOUND, PromptChoice(FLASH_4, FLASH_4))])
def test_a_process_of_its_own_checks_a_library_and_ends_no_other(
    source: str, choice: PromptChoice, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "cute.py").write_text(source)
    assert choose_prompts(setup_of(), [FLASH_4]) == choice
    assert ("its check, in a process of its own, ended with -11" in caplog.text) == (source == CRASHING)
    assert len(list(kept.rglob("*.json"))) == (source == SOUND)

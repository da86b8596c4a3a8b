"""Libraries that compute prompts and chunks: called as each documents, and used by engines."""

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.attention.libraries import (
    FLASH_4,
    PYTORCH,
    AttentionLibrary,
    CheckResult,
    ContextChunks,
    LibraryChunks,
    PromptChoice,
    installed_libraries,
    is_worth_gathering,
)
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.gpu_kernels.library_stand_ins import (
    PLAIN,
    flash_4,
    plain_paged,
    plain_whole,
    varlen_attn,
    without_guard,
)
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model
from tests.support.prompt_setups import WINDOW, layout, setup_of

pytest.importorskip("triton")

from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.attention.library_check import LibraryCheck

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]

GPU = torch.device("cuda")


# --- an engine that uses one


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("mistral")
    make_tiny_model(folder, "mistral_window")
    return tiny_decoder(folder)


def generated(decoder: Decoder, attention: str) -> list[int]:
    """Return tokens of a prompt at once beside one in chunks, of which one ends within a block."""
    tiny = TinyEngine(decoder, attention=attention)
    tiny.add("a", random_tokens(9, 9))
    tiny.add("b", random_tokens(12, 12))
    for slices in ({"a": 9, "b": 5}, {"a": 1, "b": 2}, {"b": 5, "a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}):
        tiny.step(**slices)
    return tiny.tokens("a") + tiny.tokens("b")


def using(monkeypatch: pytest.MonkeyPatch, library: AttentionLibrary, choice: PromptChoice) -> None:
    """Let engines have this library by this choice."""
    monkeypatch.setattr(triton_backend, "installed_libraries", lambda *_: [library])
    monkeypatch.setattr(triton_backend, "best_libraries", lambda device: (library.name,))
    monkeypatch.setattr(triton_backend, "choose_prompts", lambda *_: choice)


@pytest.mark.parametrize(("choice", "calls"), [(PromptChoice("plain", "plain"), (1, 2)), (PromptChoice(), (0, 0))])
def test_prompts_and_chunks_go_to_the_library_that_is_chosen(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, choice: PromptChoice, calls: tuple[int, int]
) -> None:
    seen = {"whole": 0, "paged": 0}

    def counted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*own: Any) -> Tensor:
            seen[name] += 1
            return kernel(*own)

        return compute

    library = AttentionLibrary("plain", counted("whole", plain_whole), counted("paged", plain_paged))
    using(monkeypatch, library, choice)
    assert generated(decoder, TRITON) == generated(decoder, TORCH)
    assert tuple(count // decoder.config.num_layers for count in seen.values()) == calls


def test_slots_behind_a_context_hold_zeros_where_a_library_reads_them(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TinyEngine's blocks hold NaN until they are written."""
    library = AttentionLibrary("plain", plain_whole, without_guard)
    expected = generated(decoder, TORCH)
    using(monkeypatch, library, PromptChoice("plain", "plain", clears_tails=True))
    assert generated(decoder, TRITON) == expected


@pytest.mark.parametrize("kind", ["whole", "paged"])
def test_where_a_library_fails_in_service_our_kernel_computes_that_step_and_all_others(
    kind: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fails_later(*own: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second layer
            raise RuntimeError("too many sequences")
        return plain_whole(*own) if kind == "whole" else plain_paged(*own)

    library = PLAIN._replace(whole=fails_later) if kind == "whole" else PLAIN._replace(paged=fails_later)
    using(monkeypatch, library, PromptChoice("plain", "plain"))
    assert generated(decoder, TRITON) == generated(decoder, TORCH)
    assert calls == 2
    assert caplog.text.count("plain failed, our own kernel goes on in its place: RuntimeError: too many sequences") == 1


def test_blocks_that_are_filled_from_their_end_stay_with_our_kernel(decoder: Decoder) -> None:
    """So do all, where slots behind a context may be another's, and a library needs zeros there."""
    tiny = TinyEngine(decoder, attention=TRITON)
    for name in ("a", "b"):
        tiny.add(name, random_tokens(9, 9))
    table, planner = tiny.engine._table, tiny.engine._builder._planner
    assert isinstance(planner, triton_backend.GpuPlanner)
    row, other = (table.rows([RequestId(name)]) for name in ("a", "b"))

    def is_own() -> bool:
        return not isinstance(planner.plan(row[:0], row, row * 0 + 9).prompts, LibraryChunks)

    planner.use_library(PLAIN, for_whole=False, for_paged=True)
    assert not is_own()
    table.is_reversed[row] = True
    assert is_own()
    table.is_reversed[row], table.is_reversed[other] = False, True
    assert not is_own()
    planner.use_library(PLAIN, for_whole=False, for_paged=True, clears_tails=True)
    assert is_own()


def test_contexts_are_gathered_for_long_chunks_alone() -> None:
    def are_worth(length: int, count: int) -> bool:
        own = SequenceTable(max_sequences=1, max_context_len=1 << 17, block_size=16)
        blocks = tuple(BlockId(index) for index in range(length // 16))
        once = SamplingParams(max_tokens=1)
        own.add(NewSequence(RequestId("a"), (0,) * length, length, length - count, blocks, once))
        row = own.rows([RequestId("a")])
        return is_worth_gathering(ContextChunks(own, row, row * 0 + count), 4096)

    assert [are_worth(4096, 512), are_worth(4096, 64), are_worth(1 << 16, 512)] == [True, False, False]


# --- how each is called


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any] | None) -> None:
    """Install a module of this name that has the function and nothing else; None: importing it fails."""
    module = types.ModuleType(name)
    if function is not None:
        module.__dict__[function.__name__] = function
    monkeypatch.setitem(sys.modules, name, module if function is not None else None)


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "torch.nn.attention.varlen"):
        install(monkeypatch, name, None)


MODULES: dict[str, tuple[str, Callable[..., Any]]] = {
    FLASH_4: ("flash_attn.cute", flash_4),
    PYTORCH: ("torch.nn.attention.varlen", varlen_attn),
}


@pytest.mark.usefixtures("none_installed")
def test_nothing_is_installed() -> None:
    assert installed_libraries(layout(), GPU) == []


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize("name", [FLASH_4, PYTORCH])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_is_found_and_computes_what_our_kernel_does(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *MODULES[name])
    (library,) = installed_libraries(layout(), GPU)
    assert (library.name, library.gathers) == (name, name == PYTORCH)
    assert LibraryCheck(setup_of(window), library).result() == CheckResult(40)


@pytest.mark.usefixtures("none_installed")
def test_a_pytorch_without_these_arguments_is_left_out_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def varlen_attn(query: Tensor, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> None:
        """As of PyTorch 2.11."""

    install(monkeypatch, "torch.nn.attention.varlen", varlen_attn)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert [installed_libraries(layout(), GPU) for _ in range(2)] == [[], []]
    said = "PyTorch 2.11.0 computes no prompts and no chunks here, it is too old: 2.12 does"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cuda"), ("bfloat16", "cpu")])
def test_libraries_are_for_halves_on_a_gpu(dtype: str, device: str) -> None:
    assert installed_libraries(layout(16, dtype), torch.device(device)) == []


def test_the_stand_in_for_pytorch_has_the_arguments_of_the_installed_one() -> None:
    installed = inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters
    own = inspect.signature(varlen_attn).parameters
    kinds = [(name, one.kind) for name, one in installed.items() if name in own]
    assert [(name, own[name].kind) for name in own] == kinds

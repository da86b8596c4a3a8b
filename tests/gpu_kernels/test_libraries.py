"""Libraries that compute prompts and chunks: called as each documents, measured against our kernel on equal inputs, and
left out where they fail or compute something else."""

import logging
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import RequestId
from alignedserve.runtime.attention import libraries
from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.attention.libraries import (
    FLASH_2,
    FLASH_4,
    OWN,
    PYTORCH,
    AttentionLibrary,
    Pages,
    installed_libraries,
)
from alignedserve.runtime.attention.prompt_choice import ChunkShape, choose_prompts
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.device.timing import DeviceTimer
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.support.kernel_reference import attention_of_chunk
from tests.support.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("triton")

from alignedserve.runtime.attention import triton_backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]

GPU = torch.device("cuda")
WHOLE, CHUNKED = ChunkShape((9, 4), (9, 4)), ChunkShape((11, 6), (5, 6))
WINDOW = 4


def layout(block_size: int = 4, dtype: str = "bfloat16") -> BlockLayout:
    return BlockLayout(block_size=block_size, num_layers=2, num_kv_heads=2, head_dim=16, dtype=dtype)


def attended(parts: list[tuple[Tensor, Tensor, Tensor]], window: int | None, like: Tensor) -> Tensor:
    return torch.cat([attention_of_chunk(*part, window) for part in parts]).to(like.dtype)


def plain_whole(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None) -> Tensor:
    bounds = list(pairwise(starts.tolist()))
    assert longest == max(last - first for first, last in bounds)
    return attended([(q[first:last], k[first:last], v[first:last]) for first, last in bounds], window, q)


def plain_paged(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    bounds, lengths = list(pairwise(pages.starts.tolist())), pages.lengths.tolist()
    assert pages.longest_chunk == max(last - first for first, last in bounds)
    assert pages.longest_context == max(lengths)
    assert {pages.starts.dtype, pages.lengths.dtype, pages.table.dtype} == {torch.int32}
    parts = []
    for (first, last), length, blocks in zip(bounds, lengths, pages.table.long(), strict=True):
        own = [cache[blocks].flatten(0, 1)[:length] for cache in (k, v)]
        parts.append((q[first:last], *own))
    return attended(parts, window, q)  # type: ignore[arg-type]


PLAIN = AttentionLibrary("plain", plain_whole, plain_paged)


def planner_of(window: int | None = None) -> Any:
    own = layout(dtype="float32")
    table = SequenceTable(max_sequences=1, max_context_len=4, block_size=own.block_size)
    return triton_backend.GpuPlanner(table, BlockStorage(own, 1), window, 2)


def timed(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[list[Tensor]]:
    """Have measured works take these times; return what they computed."""
    seen: list[list[Tensor]] = []

    def by_turns(self: DeviceTimer, works: list[Callable[[], Any]]) -> list[float]:
        for work in works:
            seen.extend([result.clone() for result in [*work()]] for _ in range(1))
        return list(seconds[: len(works)])

    monkeypatch.setattr(DeviceTimer, "by_turns", by_turns)
    return seen


# --- the choice


@pytest.mark.parametrize("window", [None, WINDOW])
def test_every_kernel_is_measured_on_the_same_queries_keys_and_values(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = timed(monkeypatch, 2.0, 1.0)
    choice = choose_prompts(planner_of(window), [PLAIN], whole=WHOLE, chunked=CHUNKED)
    assert choice.whole == choice.paged == {OWN: 2.0, "plain": 1.0}
    for own, by_library in (seen[:2], seen[2:]):
        assert len(own) == (1 if window is None else 2)
        for one, other in zip(own, by_library, strict=True):
            assert float(one.std()) > 0.1
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)
    assert str(choice).startswith("whole prompts by plain (measured on 2048 tokens: own kernel 2000.00 ms, plain 1")
    assert "chunks by plain (measured on 2048 tokens after 2048: " in str(choice)


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def test_a_library_that_fails_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed(monkeypatch, 2.0, 1.0, 0.5)
    lacking = AttentionLibrary("lacking", fails, fails)
    choice = choose_prompts(planner_of(), [lacking, PLAIN], whole=WHOLE, chunked=CHUNKED)
    assert set(choice.whole) == set(choice.paged) == {OWN, "plain"}
    message = "lacking is installed and computes no prompts here: RuntimeError: no kernel image is available"
    assert [record.getMessage() for record in caplog.records] == [message] * 2


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_library_that_computes_something_else_is_left_out(
    factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed(monkeypatch, 2.0, 1.0)
    wrong = AttentionLibrary("wrong", lambda *own: plain_whole(*own) * factor, None)
    planner = planner_of()
    assert choose_prompts(planner, [wrong], whole=WHOLE, chunked=CHUNKED).whole == {}
    assert planner._whole is None
    assert "its results differ from ours by" in caplog.text


# --- an engine that uses one


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("mistral")
    make_tiny_model(folder, "mistral_window")
    return tiny_decoder(folder)


def generated(decoder: Decoder, attention: str) -> list[int]:
    """Return tokens of a prompt at once beside one in chunks."""
    tiny = TinyEngine(decoder, attention=attention)
    tiny.add("a", random_tokens(9, 9))
    tiny.add("b", random_tokens(12, 12))
    for slices in ({"a": 9, "b": 5}, {"a": 1, "b": 3}, {"b": 4, "a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}):
        tiny.step(**slices)
    return tiny.tokens("a") + tiny.tokens("b")


@pytest.mark.parametrize(("seconds", "calls"), [((2.0, 1.0), (1, 2)), ((1.0, 2.0), (0, 0))])
def test_prompts_and_chunks_go_to_a_library_where_it_is_faster(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], calls: tuple[int, int]
) -> None:
    seen = {"whole": 0, "paged": 0}

    def counted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*own: Any) -> Tensor:
            seen[name] += 1
            return kernel(*own)

        return compute

    library = AttentionLibrary("plain", counted("whole", plain_whole), counted("paged", plain_paged))
    timed(monkeypatch, *seconds)
    logging.getLogger("alignedserve").setLevel(logging.INFO)

    def choose(planner: Any) -> Any:
        choice = choose_prompts(planner, [library], whole=WHOLE, chunked=CHUNKED)
        seen.update(whole=0, paged=0)
        return choice

    monkeypatch.setattr(triton_backend, "choose_prompt_attention", choose)
    assert generated(decoder, TRITON) == generated(decoder, TORCH)
    assert tuple(count // decoder.config.num_layers for count in seen.values()) == calls


def test_blocks_that_are_filled_from_their_end_stay_with_our_kernel(decoder: Decoder) -> None:
    tiny = TinyEngine(decoder, attention=TRITON)
    tiny.add("a", random_tokens(9, 9))
    table, planner = tiny.engine._table, tiny.engine._builder._planner
    assert isinstance(planner, triton_backend.GpuPlanner)
    planner.use_library(PLAIN, for_whole=False, for_paged=True)
    rows = table.rows([RequestId("a")])
    counts = rows * 0 + 9
    by_library = planner.plan(rows[:0], rows, counts).prompts
    table.is_reversed[rows] = True
    assert type(planner.plan(rows[:0], rows, counts).prompts) is not type(by_library)


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


def flash_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensor, None]:
    """The documented arguments; a window excludes its left edge no more than the token itself."""
    assert causal
    assert softmax_scale == q.shape[-1] ** -0.5
    left, right = window_size
    assert right == (None if left is None else 0)
    window = None if left is None else left + 1
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    if page_table is None:
        assert cu_seqlens_k is not None
        return plain_whole(q, k, v, cu_seqlens_q, max_seqlen_q, window), None
    assert cu_seqlens_k is None
    assert seqused_k is not None
    return plain_paged(q, k, v, Pages(cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k), window), None


def flash_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None,
) -> Tensor:
    """The documented arguments of flash-attn 2."""
    assert causal
    window = None if window_size == (-1, -1) else window_size[0] + 1
    if block_table is None:
        return plain_whole(q, k, v, cu_seqlens_q, max_seqlen_q, window)
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    return plain_paged(q, k, v, Pages(cu_seqlens_q, lengths, block_table, max_seqlen_q, max_seqlen_k), window)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The documented arguments of PyTorch's; (-1, 0) is causal."""
    assert enable_gqa
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    if block_table is None:
        assert cu_seq_k is not None
        return plain_whole(query, key, value, cu_seq_q, max_q, window)
    assert cu_seq_k is None
    assert seqused_k is not None
    return plain_paged(query, key, value, Pages(cu_seq_q, seqused_k, block_table, max_q, max_k), window)


flash_4.__name__ = flash_2.__name__ = "flash_attn_varlen_func"
MODULES: dict[str, tuple[str, Callable[..., Any]]] = {
    FLASH_4: ("flash_attn.cute", flash_4),
    FLASH_2: ("flash_attn", flash_2),
    PYTORCH: ("torch.nn.attention.varlen", varlen_attn),
}


@pytest.mark.usefixtures("none_installed")
def test_nothing_is_installed() -> None:
    assert installed_libraries(layout(), GPU) == []


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_is_found_and_computes_what_our_kernel_does(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *MODULES[name])
    monkeypatch.setattr(libraries, "_PAGE_TOKENS", 4)
    (library,) = installed_libraries(layout(), GPU)
    assert library.name == name
    timed(monkeypatch, 2.0, 1.0)
    choice = choose_prompts(planner_of(window), [library], whole=WHOLE, chunked=CHUNKED)
    assert set(choice.whole) == set(choice.paged) == {OWN, name}


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cuda"), ("bfloat16", "cpu")])
def test_libraries_are_for_halves_on_a_gpu(dtype: str, device: str) -> None:
    assert installed_libraries(layout(16, dtype), torch.device(device)) == []

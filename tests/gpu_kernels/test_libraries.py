"""Libraries that compute prompts and chunks: called as each documents, measured against our kernel on equal inputs, and
left out where they fail or compute something else."""

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention import libraries, prompt_choice
from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.attention.libraries import (
    FLASH_4,
    OWN,
    PYTORCH,
    AttentionLibrary,
    Pages,
    installed_libraries,
)
from alignedserve.runtime.attention.library_steps import ContextChunks, LibraryChunks, is_worth_gathering
from alignedserve.runtime.attention.prompt_choice import (
    FAR_BYTES,
    ChunkShape,
    Measured,
    PromptChoice,
    PromptSetup,
    TrialRequest,
    TrialResult,
    TrialShapes,
    choose_prompts,
)
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from alignedserve.runtime.device.timing import DeviceTimer
from alignedserve.runtime.engine.decoder import Decoder
from tests.support.kernel_reference import attention_of_chunk
from tests.support.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("triton")

from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.attention.library_trial import Trial, differing, fitting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]

GPU = torch.device("cuda")
ODD_WHOLE, ODD_CHUNKS = ChunkShape((1, 9, 5), (1, 9, 5)), ChunkShape((11, 6, 1), (5, 1, 1))
SHAPES = TrialShapes(ODD_WHOLE, ODD_CHUNKS, ChunkShape((9, 4), (9, 4)), ChunkShape((11, 6), (5, 6)))
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


def setup_of(window: int | None = None, dtype: str = "float32", block_size: int = 4) -> PromptSetup:
    return PromptSetup("cpu", layout(block_size, dtype), 40, 2, window, SHAPES)


def tried(library: AttentionLibrary, monkeypatch: pytest.MonkeyPatch, window: int | None = None) -> TrialResult:
    monkeypatch.setattr(DeviceTimer, "by_turns", lambda self, works: [2.0, 1.0])
    return Trial(setup_of(window), library).result()


# --- the trial of one


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_that_computes_what_our_kernel_does_is_measured(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(PLAIN, monkeypatch, window) == TrialResult(40, Measured(2.0, 1.0), Measured(2.0, 1.0))


def slots_of(cache: Tensor, pages: Pages, index: int) -> Tensor:
    """Return all slots of a context's blocks."""
    blocks = pages.table[index, : -(-int(pages.lengths[index]) // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)


def without_guard(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Multiply values of unused slots by zero."""
    out = plain_paged(q, k, v, pages, window)
    for index, (first, last) in enumerate(pairwise(pages.starts.tolist())):
        out[first:last] += 0.0 * slots_of(v, pages, index).sum()
    return out


def with_narrow_offsets(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Compute where a page begins with too few bits: half of the storage's."""
    return plain_paged(q, k, v, pages._replace(table=pages.table % 20), window)


def on_the_first_layer(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Take layers for tightly packed."""
    keys, values = (cache.as_strided(cache.shape, cache.stride(), 0) for cache in (k, v))
    return plain_paged(q, keys, values, pages, window)


def writing_behind(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(0.0)
    return plain_paged(q, k, v, pages, window)


def writing_elsewhere(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    v[0, 1, 0, 3] = 1.0  # of nobody's block
    return plain_paged(q, k, v, pages, window)


def writing_into_the_cache(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    out = plain_paged(q, k, v, pages, window)
    v[int(pages.table[0, 0]), 1, 0, 3] = 1.0
    return out


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def with_stale_memory() -> Callable[..., Tensor]:
    """Return a library that multiplies what its last call has left behind by zero."""
    left = [torch.zeros(())]

    def paged(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
        out = plain_paged(q, k, v, pages, window) + 0.0 * left[0]
        left[0] = slots_of(v, pages, 0)[0].sum()
        return out

    return paged


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
SOUND = "from tests.gpu_kernels.test_libraries import flash_4 as flash_attn_varlen_func\n"


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


# --- the choice


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
        request = msgspec.json.decode(command[-1], type=TrialRequest)
        self.asked.append((request.library, request.setup.num_blocks))
        answer = self.answers[request.library]
        return answer if isinstance(answer, str) else msgspec.to_builtins(answer)


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
    near, far = setup_of(), msgspec.structs.replace(setup_of(), num_blocks=FAR_BYTES // layout().block_bytes)
    choice = trials.choose(far, "fast")
    assert (choice.for_whole, choice.for_paged) == ("fast", OWN)
    assert "fast computes no chunks here: no memory to try it at the offsets of these blocks" in caplog.text
    assert trials.choose(near, "fast").for_paged == "fast"
    trials.answers = {"fast": msgspec.structs.replace(FAST, num_blocks=far.num_blocks)}
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


def using(monkeypatch: pytest.MonkeyPatch, library: AttentionLibrary, choice: PromptChoice) -> None:
    """Let engines have this library, about which a trial has said this."""
    monkeypatch.setattr(triton_backend, "installed_libraries", lambda *_: [library])
    monkeypatch.setattr(triton_backend, "choose_prompts", lambda *_: choice)


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, (1, 2)), (3.0, (0, 0))])
def test_prompts_and_chunks_go_to_a_library_where_it_is_faster(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, seconds: float, calls: tuple[int, int]
) -> None:
    seen = {"whole": 0, "paged": 0}

    def counted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*own: Any) -> Tensor:
            seen[name] += 1
            return kernel(*own)

        return compute

    library = AttentionLibrary("plain", counted("whole", plain_whole), counted("paged", plain_paged))
    times = {OWN: 2.0, "plain": seconds}
    using(monkeypatch, library, PromptChoice(times, times))
    assert generated(decoder, TRITON) == generated(decoder, TORCH)
    assert tuple(count // decoder.config.num_layers for count in seen.values()) == calls


TIMES = {OWN: 2.0, "plain": 1.0}


def test_slots_behind_a_context_hold_zeros_where_a_library_reads_them(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TinyEngine's blocks hold NaN until they are written."""
    library = AttentionLibrary("plain", plain_whole, without_guard)
    expected = generated(decoder, TORCH)
    using(monkeypatch, library, PromptChoice(TIMES, TIMES, frozenset({"plain"})))
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
    using(monkeypatch, library, PromptChoice(TIMES, TIMES))
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
    pages = Pages(cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, page_table, page_table)
    return plain_paged(q, k, v, pages, window), None


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
    if seqused_k is None:
        assert cu_seq_k is not None
        return plain_whole(query, key, value, cu_seq_q, max_q, window)
    if block_table is None:  # contexts one after another, with unused rows behind each
        assert cu_seq_k is not None
        assert cu_seq_k.dtype == torch.int32
        places = zip(pairwise(cu_seq_q.tolist()), cu_seq_k.tolist(), seqused_k.tolist(), strict=False)
        return attended(
            [(query[a:b], key[first : first + used], value[first : first + used]) for (a, b), first, used in places],
            window,
            query,
        )
    assert cu_seq_k is None
    pages = Pages(cu_seq_q, seqused_k, block_table, max_q, max_k, block_table, block_table)
    return plain_paged(query, key, value, pages, window)


flash_4.__name__ = "flash_attn_varlen_func"
MODULES: dict[str, tuple[str, Callable[..., Any]]] = {
    FLASH_4: ("flash_attn.cute", flash_4),
    PYTORCH: ("torch.nn.attention.varlen", varlen_attn),
}


@pytest.mark.usefixtures("none_installed")
def test_nothing_is_installed() -> None:
    assert installed_libraries(layout(), GPU) == []


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize(("name", "page_tokens"), [(FLASH_4, 4), (PYTORCH, 4), (PYTORCH, 256)])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_library_is_found_and_computes_what_our_kernel_does(
    name: str, page_tokens: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *MODULES[name])
    monkeypatch.setattr(libraries, "_PAGE_TOKENS", page_tokens)
    (library,) = installed_libraries(layout(), GPU)
    assert (library.name, library.gathers) == (name, page_tokens == 256)
    assert tried(library, monkeypatch, window) == TrialResult(40, Measured(2.0, 1.0), Measured(2.0, 1.0))


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cuda"), ("bfloat16", "cpu")])
def test_libraries_are_for_halves_on_a_gpu(dtype: str, device: str) -> None:
    assert installed_libraries(layout(16, dtype), torch.device(device)) == []


def test_the_stand_in_for_pytorch_has_the_arguments_of_the_installed_one() -> None:
    installed = inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters
    own = inspect.signature(varlen_attn).parameters
    kinds = [(name, one.kind) for name, one in installed.items() if name in own]
    assert [(name, own[name].kind) for name in own] == kinds

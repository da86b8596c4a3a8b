"""Attention of prompts and chunks by libraries: PyTorch's own kernels, and flash-attn-4 where it is installed.

A table names the libraries for each generation of GPUs. Before an engine uses a library, another process compares it
with our kernel on the model's heads and blocks (`library_check`): an illegal access ends the process that makes it.
The result is kept on disk. A library whose check crashes, hangs or finds other results is left out, as the log says.
Libraries are called by the names of their documented arguments alone.

The chunks of a step as a library computes them; where it fails there, our own kernel computes that step, too."""

import functools
import importlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.accelerator import is_refusal
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.device.devices import (
    ask,
    cache_folder,
    identity_of,
    keep,
    read_kept,
    suspect,
    torch_cuda,
    verdict_path,
)
from alignedserve.runtime.kv.block_storage import BlockStorage

logger = logging.getLogger(__name__)

FLASH_4, PYTORCH = "flash-attn-4", "PyTorch"
LIBRARIES = (FLASH_4, PYTORCH)
_OWN = "our own kernel"
_DTYPES = ("float16", "bfloat16")
_CHECK = (sys.executable, "-m", "alignedserve.runtime.attention.library_check")
_LIMIT_S = 180.0  # with kernels that are compiled for the first time
# Behind so many bytes every offset of 32 bits has overflowed, signed or not, of bytes or of 2-byte elements; none does
# below the others.
FAR_BYTES, NEAR_BYTES = 9 << 30, 1 << 31

# By the first digit of a GPU's compute capability: libraries that should be faster than our kernel, the best first.
# These are estimates (decision 49) until `benchmarks.gpu.parts prompts` has run on such a GPU.
_BEST: dict[int, tuple[str, ...]] = {8: (PYTORCH,), 9: (FLASH_4, PYTORCH)}

# Arguments by which PyTorch's function is called, and the first version that has them all.
_PYTORCH_ARGUMENTS = frozenset({"scale", "window_size", "enable_gqa", "seqused_k"})
_FIRST_PYTORCH = "2.12"


class Pages(NamedTuple):
    """Contexts in blocks, and the places of the chunks that end them; all but the numbers are on the device."""

    starts: Tensor  # [contexts + 1] int32: the first query row of each chunk, and the end
    lengths: Tensor  # [contexts] int32: tokens of each context, its chunk's included
    table: Tensor  # [contexts, most blocks] int32: blocks of each, then any
    longest_chunk: int
    longest_context: int
    blocks: Tensor  # [blocks of all contexts] int64: those of each, one context after another
    firsts: Tensor  # [contexts + 1] int32: the slot of each context's first token within these blocks, and the end


# Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] of prompts one after another, the
# first row of each (and their end), the longest, the window -> as the queries.
WholePrompts = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None], Tensor]
# Queries as above, keys and values of one layer [blocks, block_size, kv_heads, head_dim], the window -> as the queries.
PagedChunks = Callable[[Tensor, Tensor, Tensor, Pages, int | None], Tensor]


class AttentionLibrary(NamedTuple):
    """The kernels of one library."""

    name: str
    whole: WholePrompts
    paged: PagedChunks
    gathers: bool = False  # chunks' contexts are copied first: it reads no blocks of our sizes


def installed_libraries(layout: BlockLayout, device: torch.device) -> list[AttentionLibrary]:
    if device.type != "cuda" or layout.dtype not in _DTYPES:
        return []
    return [library for library in map(library_named, LIBRARIES) if library is not None]


def best_libraries(device: torch.device) -> tuple[str, ...]:
    """Return the names of the libraries for this GPU's generation, the best first."""
    generation = int(torch_cuda().get_device_properties(device).major)
    return _BEST[min(generation, max(_BEST))] if generation >= min(_BEST) else ()


def library_named(name: str) -> AttentionLibrary | None:
    """Return one of LIBRARIES; None: it is not installed, or too old, which the log says."""
    module, function, build = _SOURCES[name]
    varlen = _function(module, function)
    if varlen is None:
        return None
    if name == PYTORCH and _PYTORCH_ARGUMENTS - inspect.signature(varlen).parameters.keys():
        _say_too_old(torch.__version__)
        return None
    return build(varlen)


@functools.cache  # once per process
def _say_too_old(version: str) -> None:
    known = version.split("+")[0]
    logger.warning("PyTorch %s computes no prompts and no chunks here, it is too old: %s does", known, _FIRST_PYTORCH)


def _function(module: str, name: str) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # not installed, or built for another PyTorch or CUDA
        return None
    return function


def _scale(queries: Tensor) -> float:
    return 1.0 / math.sqrt(queries.shape[-1])


def _flash_4(varlen: Callable[..., Any]) -> AttentionLibrary:
    def common(queries: Tensor, window: int | None) -> dict[str, Any]:
        left = None if window is None else window - 1
        return {
            "softmax_scale": _scale(queries),
            "causal": True,
            "window_size": (left, 0 if left is not None else None),
        }

    def whole(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    def paged(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        places = {
            "cu_seqlens_q": pages.starts,
            "seqused_k": pages.lengths,
            "page_table": pages.table,
            "max_seqlen_q": pages.longest_chunk,
            "max_seqlen_k": pages.longest_context,
        }
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    return AttentionLibrary(FLASH_4, whole, paged)


def _pytorch(varlen: Callable[..., Any]) -> AttentionLibrary:
    def common(queries: Tensor, window: int | None) -> dict[str, Any]:
        left = -1 if window is None else window - 1
        return {"scale": _scale(queries), "window_size": (left, 0), "enable_gqa": True}

    def whole(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        return _output(varlen(queries, keys, values, starts, starts, longest, longest, **common(queries, window)))

    def gathered(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        contexts = (cache.index_select(0, pages.blocks).flatten(0, 1) for cache in (keys, values))
        places = (pages.starts, pages.firsts, pages.longest_chunk, pages.longest_context)
        return _output(varlen(queries, *contexts, *places, seqused_k=pages.lengths, **common(queries, window)))

    return AttentionLibrary(PYTORCH, whole, gathered, gathers=True)


def _output(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


_SOURCES: dict[str, tuple[str, str, Callable[[Callable[..., Any]], AttentionLibrary]]] = {
    FLASH_4: ("flash_attn.cute", "flash_attn_varlen_func", _flash_4),
    PYTORCH: ("torch.nn.attention.varlen", "varlen_attn", _pytorch),
}


# --- the choice for one engine


class ChunkShape(NamedTuple):
    """Contexts, and how many of the last tokens of each are computed."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.lengths == self.counts


class CheckShapes(NamedTuple):
    """The prompts and chunks of a check: of odd lengths, then long ones."""

    odd_whole: ChunkShape = ChunkShape((1, 17, 129, 1535), (1, 17, 129, 1535))
    odd_chunks: ChunkShape = ChunkShape((1535, 130, 17, 1, 1001), (129, 17, 1, 1, 1001))
    whole: ChunkShape = ChunkShape((1536, 512), (1536, 512))
    chunks: ChunkShape = ChunkShape((3072, 1024), (1536, 512))


@dataclass(frozen=True, slots=True)
class PromptSetup:
    """The engine that a library would compute for."""

    device: str
    layout: BlockLayout
    num_blocks: int
    group: int  # query heads of each key head
    window: int | None
    shapes: CheckShapes = field(default_factory=CheckShapes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PromptSetup":
        fields = json.loads(text)
        shapes = (ChunkShape(tuple(lengths), tuple(counts)) for lengths, counts in fields["shapes"])
        return cls(**{**fields, "layout": BlockLayout(**fields["layout"]), "shapes": CheckShapes(*shapes)})


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. A reason says why the library computes no prompts, or no chunks, here; empty: it does."""

    num_blocks: int  # of the check's storage
    whole_reason: str = ""
    paged_reason: str = ""
    clears_tails: bool = False  # it computes chunks if unused slots hold numbers

    @classmethod
    def of(cls, answer: Any) -> "CheckResult | None":
        """Read a result from JSON; None: it is none."""
        names = [each.name for each in fields(cls)]
        if not isinstance(answer, dict) or sorted(answer) != sorted(names):
            return None
        values = [answer[name] for name in names]
        return cls(*values) if [type(value) for value in values] == [int, str, str, bool] else None


class PromptChoice(NamedTuple):
    """The libraries that compute whole prompts and chunks; None: our own kernel does."""

    whole: str | None = None
    paged: str | None = None
    clears_tails: bool = False  # the slots behind a context are zeroed for the library that computes chunks

    @override
    def __str__(self) -> str:
        if self.whole == self.paged:
            return f"prompts and chunks by {self.whole or _OWN}"
        return f"whole prompts by {self.whole or _OWN}; chunks by {self.paged or _OWN}"


_known: dict[PromptSetup, PromptChoice] = {}  # of this process


def choose_prompts(setup: PromptSetup, libraries: Sequence[str]) -> PromptChoice:
    """Return the first of these libraries that compute prompts, and chunks, as our kernel does. The first time on a
    machine it takes as long as a process that loads PyTorch and compiles kernels, for each library. It needs memory on
    the device for a part of the blocks: ask before the engine's own are allocated."""
    if setup not in _known:
        _known[setup] = _checked(setup, libraries)
    return _known[setup]


def _checked(setup: PromptSetup, libraries: Sequence[str]) -> PromptChoice:
    choice = PromptChoice()
    for name in libraries:
        if choice.whole is not None and choice.paged is not None:
            break
        key = [*identity_of(setup.device), name, repr(setup.layout), str(setup.group), str(setup.window)]
        path = verdict_path(cache_folder(), "library-checks", key)
        result = _result_of(name, setup, path)
        if result is None:
            continue
        paged_reason = result.paged_reason
        if not paged_reason and not _reaches(result, setup):
            paged_reason = "no memory to try it at the offsets of these blocks"
        for kind, reason in (("whole prompts", result.whole_reason), ("chunks", paged_reason)):
            if reason:
                logger.warning("%s computes no %s here: %s", name, kind, reason)
        before = choice
        if choice.whole is None and not result.whole_reason:
            choice = choice._replace(whole=name)
        if choice.paged is None and not paged_reason:
            choice = choice._replace(paged=name, clears_tails=result.clears_tails)
        if choice != before:
            _suspect(path, setup)
    return choice


def _suspect(path: Path, setup: PromptSetup) -> None:
    reason = f"the GPU failed while it was in use; to try it again, delete {path}"
    num_blocks = max(setup.num_blocks, -(-FAR_BYTES // setup.layout.block_bytes))
    suspect(path, asdict(CheckResult(num_blocks, reason, reason)))


def _result_of(name: str, setup: PromptSetup, path: Path) -> CheckResult | None:
    stored = CheckResult.of(read_kept(path))
    if stored is not None and _reaches(stored, setup):
        return stored
    answer = ask([*_CHECK, name, setup.to_json()], _LIMIT_S)
    result = None if isinstance(answer, str) else CheckResult.of(answer)
    if result is None:
        reason = answer if isinstance(answer, str) else "said nothing that can be read"
        logger.warning("%s computes no prompts here: its check, in a process of its own, %s", name, reason)
    elif _reaches(result, setup):
        keep(path, asdict(result))
    return result


def _reaches(result: CheckResult, setup: PromptSetup) -> bool:
    block_bytes = setup.layout.block_bytes
    needed_bytes = setup.num_blocks * block_bytes
    return result.num_blocks * block_bytes >= min(FAR_BYTES, needed_bytes) or needed_bytes <= NEAR_BYTES


# Bytes of keys and values that are gathered for a layer; and tokens of a chunk below which our kernel, which reads each
# of them once, is faster than a library behind a copy of its context.
_MOST_GATHERED_BYTES = 128 << 20
LEAST_GATHERED_CHUNK = 256

OnFailure = Callable[[AttentionLibrary, Exception], None]


def raise_failure(_library: AttentionLibrary, error: Exception) -> None:
    raise error


class ChunkComputer(Protocol):
    """Several tokens of each of some sequences, on every layer."""

    host_arrays: list[Array]

    def bind(self, tensors: Sequence[Tensor]) -> None: ...

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill `out`, as StepAttention.chunks does."""


class _LibraryStep:
    def __init__(
        self, library: AttentionLibrary, window: int | None, own: ChunkComputer, on_failure: OnFailure
    ) -> None:
        self._library = library
        self._window = window
        self._own = own
        self._on_failure = on_failure
        self._has_failed = False

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        if not self._has_failed:
            try:
                tokens, kv_heads, group, head_dim = queries.shape
                flat = queries.reshape(tokens, kv_heads * group, head_dim)
                result = self._compute(flat, new, layer, self._window if is_windowed else None)
                out.copy_(result.view(out.shape))
                return
            except Exception as error:
                if isinstance(error, torch.AcceleratorError) and not is_refusal(error):
                    raise
                self._has_failed = True
                self._on_failure(self._library, error)
                self._own.bind(to_device(self._own.host_arrays, queries.device))
        self._own.run(queries, new, out, layer, is_windowed)

    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        raise NotImplementedError


class LibraryPrompts(_LibraryStep):
    """Prompts from their first token on, which read only the keys and values that the layer has just computed."""

    def __init__(
        self, library: AttentionLibrary, counts: IntArray, window: int | None, own: ChunkComputer, on_failure: OnFailure
    ) -> None:
        super().__init__(library, window, own, on_failure)
        self.host_arrays: list[Array] = [_starts(counts)]
        self._longest = int(counts.max())
        self._starts: Tensor | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        (self._starts,) = tensors

    @override
    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        assert self._starts is not None, "a layer is computed before its arrays are bound"
        keys, values = (part.view(len(part), -1, queries.shape[-1]) for part in new)
        return self._library.whole(queries, keys, values, self._starts, self._longest, window)


class ContextChunks:
    """The contexts of some chunks in blocks, as the table has them now."""

    def __init__(self, table: Contexts, rows: IntArray, counts: IntArray) -> None:
        self.counts = counts
        self.lengths = table.num_computed[rows] + counts
        self._block_size = table.block_size
        self._widths = -(-self.lengths // table.block_size)
        self._tables = table.block_tables[rows, : int(self._widths.max())]

    @property
    def num_slots(self) -> int:
        return int(self._widths.sum()) * self._block_size

    def arrays(self) -> list[Array]:
        is_own = np.arange(self._tables.shape[1]) < self._widths[:, None]
        table = np.where(is_own, self._tables, 0).astype(np.int32)
        blocks = self._tables[is_own].astype(np.int64)
        return [_starts(self.counts), self.lengths.astype(np.int32), table, blocks, self._firsts()]

    def _firsts(self) -> Array:
        return _starts(self._widths * self._block_size)

    def tails(self) -> list[Array]:
        last = self._tables[np.arange(len(self.lengths)), self._widths - 1]
        first = self.lengths - (self._widths - 1) * self._block_size
        is_tail = np.arange(self._block_size) >= first[:, None]
        places, slots = np.nonzero(is_tail)
        return [last[places].astype(np.int64), slots.astype(np.int64)]


class LibraryChunks(_LibraryStep):
    """ChunkComputer over contexts in blocks, whose slots are filled from the front."""

    def __init__(
        self,
        library: AttentionLibrary,
        storage: BlockStorage,
        chunks: ContextChunks,
        window: int | None,
        own: ChunkComputer,
        on_failure: OnFailure,
        *,
        clears_tails: bool,
    ) -> None:
        """`clears_tails`: zeros are written behind the contexts' ends before the library reads their last blocks."""
        super().__init__(library, window, own, on_failure)
        self.host_arrays: list[Array] = [*chunks.arrays(), *(chunks.tails() if clears_tails else ())]
        self._storage = storage
        self._longest = (int(chunks.counts.max()), int(chunks.lengths.max()))
        self._pages: Pages | None = None
        self._tails: list[Tensor] = []

    def bind(self, tensors: Sequence[Tensor]) -> None:
        starts, lengths, table, blocks, firsts, *self._tails = tensors
        self._pages = Pages(starts, lengths, table, *self._longest, blocks, firsts)

    @override
    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        assert self._pages is not None, "a layer is computed before its arrays are bound"
        if self._tails:  # of all layers at once, before the first
            self._storage.zero_slots(*self._tails)
            self._tails = []
        blocks = self._storage.blocks[:, layer]
        return self._library.paged(queries, blocks[:, 0], blocks[:, 1], self._pages, window)


def is_worth_gathering(chunks: ContextChunks, token_bytes: int) -> bool:
    """Return whether a library that reads no blocks should compute these. `token_bytes`: of keys and values."""
    return chunks.counts.mean() >= LEAST_GATHERED_CHUNK and chunks.num_slots * token_bytes <= _MOST_GATHERED_BYTES


def _starts(counts: IntArray) -> Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

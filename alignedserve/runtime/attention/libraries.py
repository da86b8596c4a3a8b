"""Attention of prompts and chunks by libraries: PyTorch's own kernels, and flash-attn-4 where it is installed.

A table names the libraries for each generation of GPUs. Before an engine uses a library, another process compares it
with our kernel on the model's heads and blocks (`library_check`): an illegal access ends the process that makes it.
The result is kept on disk. A library whose check crashes, hangs or finds other results is left out, as the log says.
Libraries are called by the names of their documented arguments alone.
"""

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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.devices import torch_cuda
from alignedserve.runtime.device.verdicts import ask, cache_folder, identity_of, keep, read_kept, suspect, verdict_path

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
    """Return the first of these libraries that compute prompts, and chunks, as our kernel does.

    The first time on a machine it takes as long as a process that loads PyTorch and compiles kernels, for each library.
    It needs memory on the device for a part of the blocks: ask before the engine's own are allocated.
    """
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

"""The choice of kernels for prompts and chunks: ours, or those of a library that is faster here.

Each library is tried by a process of its own (`library_trial`), on the model's heads and blocks, as an illegal access
would end all computing of the process that makes it. What a trial found is remembered as the self-check's verdict is.
A library whose trial crashes, hangs or finds other results than ours is left out, which the log says.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.libraries import OWN
from alignedserve.runtime.device.verdicts import ask, cache_folder, identity_of, keep, read_kept, suspect, verdict_path

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "alignedserve.runtime.attention.library_trial")
_LIMIT_S = 180.0  # with kernels that are compiled for the first time
_FOLDER = "library-trials"
# Behind so many bytes every offset of 32 bits has overflowed, signed or not, of bytes or of 2-byte elements; none does
# below the others.
FAR_BYTES, NEAR_BYTES = 9 << 30, 1 << 31


class ChunkShape(NamedTuple):
    """Contexts, and the last tokens of each that are computed."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.lengths == self.counts

    @override
    def __str__(self) -> str:
        cached = sum(self.lengths) - sum(self.counts)
        return f"{sum(self.counts)} tokens" + (f" after {cached}" if cached else "")


class TrialShapes(NamedTuple):
    """What a trial computes: prompts and chunks to compare, of odd lengths; and those that it measures."""

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
    shapes: TrialShapes = field(default_factory=TrialShapes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What a trial is asked."""

    library: str
    setup: PromptSetup

    def to_json(self) -> str:
        """Return it as JSON, by Python's own module: where speed is measured there may be no other."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrialRequest":
        said = json.loads(text)
        shapes = (ChunkShape(tuple(lengths), tuple(counts)) for lengths, counts in said["setup"]["shapes"])
        own = {"layout": BlockLayout(**said["setup"]["layout"]), "shapes": TrialShapes(*shapes)}
        return cls(said["library"], PromptSetup(**{**said["setup"], **own}))


class Measured(NamedTuple):
    """Seconds of our kernel and of a library, by turns."""

    own_s: float
    library_s: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial found. None: the library does not compute this here, for the reason that is given."""

    num_blocks: int  # of its storage
    whole: Measured | None
    paged: Measured | None
    whole_reason: str = ""
    paged_reason: str = ""
    clears_tails: bool = False  # it computes chunks if unused slots hold numbers

    @classmethod
    def of(cls, said: Any) -> "TrialResult":
        """Read the fields of one from JSON. Raises KeyError, TypeError or ValueError for anything else."""
        whole, paged = (_measured(said[name]) for name in ("whole", "paged"))
        others = [said[name] for name in ("num_blocks", "whole_reason", "paged_reason", "clears_tails")]
        if [type(value) for value in others] != [int, str, str, bool]:
            raise TypeError("fields of other types")
        num_blocks, whole_reason, paged_reason, clears_tails = others
        return cls(num_blocks, whole, paged, whole_reason, paged_reason, clears_tails)


def _measured(said: Any) -> Measured | None:
    if said is None:
        return None
    own_s, library_s = said
    if not (isinstance(own_s, float) and isinstance(library_s, float)):
        raise TypeError("no seconds")
    return Measured(own_s, library_s)


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The kernels that compute whole prompts and chunks, with the seconds of each by name, where there was a choice."""

    whole: Mapping[str, float] = field(default_factory=dict)
    paged: Mapping[str, float] = field(default_factory=dict)
    clears: frozenset[str] = frozenset()  # libraries that need numbers in unused slots
    shapes: TrialShapes = field(default_factory=TrialShapes)

    @property
    def for_whole(self) -> str:
        return _fastest(self.whole)

    @property
    def for_paged(self) -> str:
        return _fastest(self.paged)

    @property
    def clears_tails(self) -> bool:
        """Return whether the slots behind a context must be zeroed for the kernel for chunks."""
        return self.for_paged in self.clears

    @override
    def __str__(self) -> str:
        parts = (("whole prompts", self.shapes.whole, self.whole), ("chunks", self.shapes.chunks, self.paged))
        measured = [f"{what} by {_described(shape, seconds)}" for what, shape, seconds in parts if seconds]
        return "; ".join(measured) or "prompts and chunks by our own kernel, the only one here"


_known: dict[PromptSetup, PromptChoice] = {}  # of this process


def choose_prompts(setup: PromptSetup, libraries: Sequence[str]) -> PromptChoice:
    """Return which of our kernel and these libraries compute prompts and chunks fastest, and as ours does.

    The first time on a machine it takes as long as a process that loads PyTorch and compiles kernels, for each library.
    It needs memory on the device for a part of the blocks: ask before the engine's own are allocated.
    """
    if not libraries:
        return PromptChoice()
    if setup not in _known:
        choice = _combined(setup, {name: _result_of(TrialRequest(name, setup)) for name in libraries})
        for name in {choice.for_whole, choice.for_paged} - {OWN}:
            _suspect(name, setup)
        _known[setup] = choice
    return _known[setup]


def _suspect(name: str, setup: PromptSetup) -> None:
    path = _path_of(TrialRequest(name, setup))
    reason = f"the GPU failed while it was in use; to try it again, delete {path}"
    num_blocks = max(setup.num_blocks, -(-FAR_BYTES // setup.layout.block_bytes))
    suspect(path, asdict(TrialResult(num_blocks, None, None, reason, reason)))


def _combined(setup: PromptSetup, results: Mapping[str, TrialResult | None]) -> PromptChoice:
    whole, paged, clears = {}, {}, set()
    for name, result in results.items():
        if result is None:
            continue
        _log_reasons(name, result)
        if result.whole is not None:
            whole[name] = result.whole
        if result.paged is None:
            continue
        if not _reaches(result, setup):
            logger.warning("%s computes no chunks here: no memory to try it at the offsets of these blocks", name)
            continue
        paged[name] = result.paged
        clears |= {name} if result.clears_tails else set()
    return PromptChoice(_seconds(whole), _seconds(paged), frozenset(clears), setup.shapes)


def _seconds(measured: Mapping[str, Measured]) -> dict[str, float]:
    if not measured:
        return {}
    own_s = next(iter(measured.values())).own_s
    return {OWN: own_s, **{name: own_s * one.library_s / one.own_s for name, one in measured.items()}}


def _result_of(request: TrialRequest) -> TrialResult | None:
    setup, path = request.setup, _path_of(request)
    kept = _decoded(read_kept(path))
    if kept is not None and _reaches(kept, setup):
        return kept
    said = ask([*_COMMAND, request.to_json()], _LIMIT_S)
    found = None if isinstance(said, str) else _decoded(said)
    if found is None:
        reason = said if isinstance(said, str) else "said nothing that can be read"
        logger.warning("%s computes no prompts here: its trial, in a process of its own, %s", request.library, reason)
    elif _reaches(found, setup):
        keep(path, asdict(found))
    return found


def _path_of(request: TrialRequest) -> Path:
    setup = request.setup
    key = [*identity_of(setup.device), request.library, repr(setup.layout), str(setup.group), str(setup.window)]
    return verdict_path(cache_folder(), _FOLDER, key)


def _decoded(said: object) -> TrialResult | None:
    try:
        return TrialResult.of(said)
    except (KeyError, TypeError, ValueError):
        return None


def _reaches(result: TrialResult, setup: PromptSetup) -> bool:
    tried_bytes = result.num_blocks * setup.layout.block_bytes
    return tried_bytes >= min(FAR_BYTES, setup.num_bytes) or setup.num_bytes <= NEAR_BYTES


def _log_reasons(name: str, result: TrialResult) -> None:
    for what, reason in (("whole prompts", result.whole_reason), ("chunks", result.paged_reason)):
        if reason:
            logger.warning("%s computes no %s here: %s", name, what, reason)


def _fastest(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name]) if seconds else OWN


def _described(shape: ChunkShape, seconds: Mapping[str, float]) -> str:
    times = ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in seconds.items())
    return f"{_fastest(seconds)} (measured on {shape}: {times})"


def device_of(setup: PromptSetup) -> torch.device:
    return torch.device(setup.device)

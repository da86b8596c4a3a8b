"""Every single iteration of an 8B shape that was timed on a GPU, from the records of benchmarks.gpu."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.costmodel.linear import Sample

DECODES, LONG, PROMPTS, SHORT, STARTING, MIXED = (
    "decodes, 64 x 2 048 and 256 x 512",
    "a prompt of 4 096 tokens",
    "prompts of 512 to 2 048, part `mixed`",
    "prompts of 16 to 256, a worker at its start",
    "prompts of 512 to 2 048, a worker at its start",
    "140 decodes of 1 726 and a chunk, 512 to 2 048 tokens",
)
KINDS = (DECODES, LONG, PROMPTS, SHORT, STARTING, MIXED)
MIXED_CONTEXTS, MIXED_CACHED = (1726,) * 140, 1024  # decodes, and tokens before the chunk

_LONG_PROMPT = 4096
_LEAST_STAIR = 512  # tokens; below, all prompts take what the host needs for their launches


class TimedIteration(NamedTuple):
    """One iteration and its seconds."""

    kind: str
    point: Point
    seconds: float

    @property
    def sample(self) -> Sample:
        return Sample(self.point.work, self.seconds)


def timed_iterations(folder: Path) -> list[TimedIteration]:
    found = [*_plain(folder), *_profiled(folder), *_mixed(folder), *_at_start(folder)]
    return sorted(found, key=lambda one: KINDS.index(one.kind))


def figures_of(folder: Path, name: str) -> Any:
    return json.loads((folder / f"gpu_{name}.json").read_text())["figures"]


def _plain(folder: Path) -> Iterator[TimedIteration]:
    for row in figures_of(folder, "iterations")["rows"]:
        if row["kind"] == "decode":
            yield TimedIteration(DECODES, _decodes(64, 2048), row["milliseconds"] * 1e-3)
        elif row["kind"] == "prefill":
            yield TimedIteration(LONG, _prompt(_LONG_PROMPT), row["milliseconds"] * 1e-3)


def _profiled(folder: Path) -> Iterator[TimedIteration]:
    for batch in figures_of(folder, "profile")["batches"]:
        count, length = map(int, batch["batch"].split(" x "))
        yield TimedIteration(DECODES, _decodes(count, length), batch["step_ms"] * 1e-3)


def _mixed(folder: Path) -> Iterator[TimedIteration]:
    for row in figures_of(folder, "mixed")["rows"]:
        chunk = Chunk(row["tokens"] - len(MIXED_CONTEXTS), MIXED_CACHED, is_last=False)
        yield TimedIteration(PROMPTS, _prompt(row["tokens"]), row["alone_ms"] * 1e-3)
        yield TimedIteration(MIXED, Point("mixed", (chunk,), MIXED_CONTEXTS), row["mixed_ms"] * 1e-3)


def _at_start(folder: Path) -> Iterator[TimedIteration]:
    stairs = figures_of(folder, "full-sizes")["policies"]["aligned_slo"]["full_sizes"]
    for size, seconds in zip(stairs["sizes"], stairs["seconds"], strict=True):
        yield TimedIteration(STARTING if size >= _LEAST_STAIR else SHORT, _prompt(size), seconds)


def _decodes(count: int, context_len: int) -> Point:
    return Point("decode", contexts=(context_len,) * count)


def _prompt(num_tokens: int) -> Point:
    return Point("prefill", (Chunk(num_tokens, 0, is_last=True),))

"""The parts of benchmarks.gpu, in the order in which an unknown GPU is met; loads nothing heavy."""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_WIDTH = 140
DEFAULT_POLICIES = ("aligned_slo",)  # of the promise
# How a part is run: by itself; as groups of kernels by turns; the same for the best of many; told its device.
PART, GROUPS, SWEEP, MEASURE = "part", "groups", "sweep", "measure"
_NARROW, _STEPS, _PASSES = "gpu.slices.narrow_kernels", "gpu.slices.steps", "gpu.slices.narrow_iterations"
_ATTENTION = "kernels.attention"


class ListedPart(NamedTuple):
    """One part: a command of its own, below nine minutes."""

    name: str
    minutes: float  # that it takes on an H100, by estimate; its weight where several share the time
    what: str
    how: str
    where: str  # module below benchmarks, function


_ROWS: tuple[tuple[str, float, str, str, str], ...] = (
    ("sanitizer", 1.0, "the self-check, alone and under compute-sanitizer's tools", PART, "gpu.parts:sanitize"),
    ("tests", 4.0, "the kernels' tests, and those marked gpu; first where none is named", PART, "gpu.parts:test"),
    ("kernels", 2.0, "every kernel of a pass against the GPU's rates", GROUPS, "kernels.benchmark:all_groups"),
    ("iterations", 1.5, "iterations of an 8B shape against what they read", PART, "gpu.parts:iterations"),
    ("transfers", 1.0, "lists of blocks between GPU and host", PART, "gpu.parts:transfers"),
    ("fp8-cache", 1.0, "decode attention over caches of bfloat16 and of FP8", GROUPS, f"{_NARROW}:cache_cases"),
    ("products", 4.0, "products in 4 and 8 bits, FP8, and of experts", GROUPS, f"{_NARROW}:product_cases"),
    ("products-sweep", 8.0, "products in 4 and 8 bits: tile x warps x stages", SWEEP, f"{_NARROW}:tiling_cases"),
    (
        "narrow-iterations",
        4.0,
        "8B iterations with FP8 and 4-bit weights",
        MEASURE,
        f"{_PASSES}:compare_iterations",
    ),
    ("prompts", 4.0, "prompts and chunks by every library, blocks of 16 and 128", GROUPS, f"{_ATTENTION}:prompt_cases"),
    ("promise", 2.5, "chat beside a deep backlog of documents, live: an 8B shape", PART, "gpu.parts:promise"),
    ("mixed", 0.5, "8B iterations by tokens: chunks alone, beside 140 decodes", MEASURE, f"{_STEPS}:measure_mixed"),
    ("profile", 3.0, "ten 8B decode steps by kernel, at 64 and 256 sequences", MEASURE, f"{_STEPS}:profile_steps"),
)
WITH_TARGETS = ("sanitizer", "kernels", "iterations", "transfers")  # run where no part is named
PART_LIST = tuple(ListedPart(*row) for row in _ROWS)
PARTS = {part.name: part for part in PART_LIST}


def print_parts() -> None:
    table = Table(title="python -m benchmarks.gpu.parts NAME", title_justify="left", header_style="bold")
    for heading in ("part", "minutes", "measures"):
        table.add_column(heading)
    for part in PART_LIST:
        table.add_row(part.name, f"{part.minutes:g}", part.what)
    Console(width=_WIDTH).print(table)

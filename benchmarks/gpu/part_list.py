"""The parts of benchmarks.gpu, in the order in which an unknown GPU is met; loads nothing heavy."""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_WIDTH = 140
DEFAULT_POLICIES = ("aligned_slo",)  # of the promise


class ListedPart(NamedTuple):
    """One part: a command of its own, below nine minutes."""

    name: str
    minutes: float  # that it takes on an H100, by estimate; its weight where several share the time
    what: str
    has_targets: bool = False  # run where no part is named


PART_LIST = (
    ListedPart("sanitizer", 1.0, "the self-check, alone and under compute-sanitizer's tools", has_targets=True),
    ListedPart("tests", 4.0, "the kernels' tests on the GPU, and those marked gpu; first where no part is named"),
    ListedPart("logits", 1.0, "log-probabilities of a small Llama against transformers and float64", has_targets=True),
    ListedPart("kernels", 2.0, "every kernel of a pass against bandwidth and matrix rate", has_targets=True),
    ListedPart("iterations", 1.5, "iterations of an 8B shape against what they read", has_targets=True),
    ListedPart("transfers", 1.0, "lists of blocks between GPU and host", has_targets=True),
    ListedPart("generation", 1.5, "tokens per second against transformers", has_targets=True),
    ListedPart("attention-sweep", 8.0, "decode attention: tile x warps x stages x programs"),
    ListedPart("fp8-cache", 1.0, "decode attention over caches of bfloat16 and of FP8"),
    ListedPart("products", 4.0, "products in 4 and 8 bits, FP8 by row and in blocks, and of experts"),
    ListedPart("products-sweep", 8.0, "products in 4 and 8 bits: tile x warps x stages, and unpacked first"),
    ListedPart("narrow-iterations", 4.0, "8B iterations with FP8 and 4-bit weights against bfloat16 (at most 0.65)"),
    ListedPart("prompts", 4.0, "prompts and chunks, blocks of 16 and 128: flash-attn-4, PyTorch's, ours"),
    ListedPart("list-copies", 0.5, "lists of blocks to an arena and back, by size: gathered, or by one call"),
    ListedPart("promise", 2.5, "chat beside a deep backlog of documents: one elastic worker of an 8B shape, live"),
    ListedPart("mixed", 0.5, "iterations of an 8B shape by their tokens: chunks alone, and beside 140 decodes"),
    ListedPart("kinds", 4.0, "models with every kind of layers, a few layers of each, against transformers"),
    ListedPart("latents-sweep", 1.5, "latent attention: rows x tokens x warps x stages"),
    ListedPart("states-sweep", 0.5, "the gated delta rule and Mamba-2: elements of a state in one program"),
    ListedPart("scores", 0.5, "decode attention with sinks and caps against none"),
    ListedPart("profile", 3.0, "ten 8B decode steps by kernel, at 64 and 256 sequences"),
)


def print_parts() -> None:
    table = Table(title="python -m benchmarks.gpu.parts NAME", title_justify="left", header_style="bold")
    for heading in ("part", "minutes", "measures"):
        table.add_column(heading)
    for part in PART_LIST:
        table.add_row(part.name, f"{part.minutes:g}", part.what)
    Console(width=_WIDTH).print(table)

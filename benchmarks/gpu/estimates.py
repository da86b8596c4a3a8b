"""How long iterations of an 8B Llama would take by what they read and multiply: estimates, no measurement.

    python -m benchmarks.gpu.estimates

Decodes by bytes over the memory's bandwidth, prefill by operations over the rate of products in bfloat16, both as
NVIDIA's data sheets have them. Kernels reach a share of either.
"""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from alignedserve.core.block_layout import FP8
from alignedserve.profiling.shapes import SHAPES
from alignedserve.runtime.model.model_config import ModelConfig

SHAPE = "llama-3-8b"
BATCHES = ((1, 2048), (64, 2048), (256, 512))  # sequences, tokens of each
PROMPT_LEN = 4096
_GROUP = 128


class Gpu(NamedTuple):
    """A GPU by its data sheet."""

    name: str
    bytes_per_s: float
    operations_per_s: float  # in bfloat16


class Form(NamedTuple):
    """Weights and cache."""

    name: str
    weight_bytes: float  # of one number, scales included
    cache: str


GPUS = (
    Gpu("L40S", 0.864e12, 362e12),
    Gpu("A100 80 GB", 2.04e12, 312e12),
    Gpu("H100 SXM", 3.35e12, 989e12),
    Gpu("H200", 4.8e12, 989e12),
)
FORMS = (
    Form("bfloat16", 2.0, "bfloat16"),
    Form("FP8 cache", 2.0, FP8),
    Form("FP8 weights by row", 1.0, "bfloat16"),
    Form("FP8 weights and cache", 1.0, FP8),
    Form("FP8 weights in blocks", 1.0 + 4 / _GROUP, "bfloat16"),
    Form("4 bits in groups of 128", 0.5 + 5 / _GROUP, "bfloat16"),
)


def decode_bytes(config: ModelConfig, form: Form, num_sequences: int, context_len: int) -> float:
    """Return what a step reads: every matrix once, the head in bfloat16, keys and values of every context."""
    head = config.vocab_size * config.embedding_size
    layers = config.num_multiplied - head
    cached = config.block_layout(16, form.cache).token_bytes
    return layers * form.weight_bytes + 2 * head + num_sequences * context_len * cached


def prefill_operations(config: ModelConfig, prompt_len: int) -> float:
    """Return the operations of one prompt, the head for its last token alone."""
    head = config.vocab_size * config.embedding_size
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * pairs * config.query_width * config.num_layers
    return 2 * (config.num_multiplied - head) * prompt_len + 2 * head + attention


def main() -> None:
    """Print the table."""
    config = SHAPES[SHAPE]
    table = Table(title=f"{SHAPE}: estimated milliseconds, no measurement", title_justify="left")
    for heading in ("GPU", "form", *(f"{count} x {length}" for count, length in BATCHES), "to bfloat16", "prefill"):
        table.add_column(heading)
    for gpu in GPUS:
        plain = decode_bytes(config, FORMS[0], *BATCHES[1])
        prefill = f"{prefill_operations(config, PROMPT_LEN) / gpu.operations_per_s * 1e3:.0f}"
        for form in FORMS:
            sizes = [decode_bytes(config, form, *batch) for batch in BATCHES]
            times = (f"{size / gpu.bytes_per_s * 1e3:.1f}" for size in sizes)
            table.add_row(gpu.name, form.name, *times, f"{sizes[1] / plain:.2f}", prefill)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

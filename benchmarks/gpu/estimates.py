"""How long steps would take by the ledger and by data sheets: estimates, no measurement.

    python -m benchmarks.gpu.estimates

Each kernel takes the longer of two times: its bytes over the memory's bandwidth, its operations over the rate of
products. Kernels reach a share of either. Between two of them are LAUNCH_S; a step that no graph replays takes as long
as the host needs for its launches, if that is longer. Kernels and bytes: `benchmarks/results/gpu/ledger.json`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.gpu.ledger.forms import (
    CHATS,
    DENSE,
    FEW,
    LONG,
    MANY,
    MIXED_AHEAD,
    MODELS,
    NARROW,
    NARROWER,
    ONE,
    PROMPT,
    QWEN3,
    ModelForm,
    StepForm,
)
from benchmarks.gpu.ledger.kernel_bytes import TO_GPU, TO_HOST, met_share
from benchmarks.gpu.ledger.ledger import Ledger, LedgerStep, read
from benchmarks.measuring.arguments import parser_of

_ROUTER_BYTES = 4.0  # of a number: routers are in float32


def ideal_bytes(form: ModelForm, step: StepForm) -> float:
    """Return the bytes of weights and cache of a step of decodes."""
    return _matrix_bytes(form, step.num_decodes) + _cache_bytes(form, step)


def memory_bytes(form: ModelForm, step: StepForm) -> float:
    """Return the bytes of all weights, and of the cache of all the step's contexts."""
    config = form.config
    experts = 0 if config.experts is None else config.experts.num_experts
    layers = config.num_layers * _layer_bytes(form, experts)
    tokens = step.num_decodes * step.context_len + step.prompt_len
    return layers + 2 * _head_bytes(config) + tokens * _token_bytes(form)


def _matrix_bytes(form: ModelForm, num_rows: int) -> float:
    config = form.config
    met = 0.0
    if config.experts is not None:
        met = config.experts.num_experts * met_share(config.experts.num_experts, num_rows * config.experts.num_chosen)
    return config.num_layers * _layer_bytes(form, met) + _head_bytes(config)


def _layer_bytes(form: ModelForm, num_experts: float) -> float:
    config = form.config
    attention = config.hidden_size * (2 * config.query_width + 2 * config.kv_width)
    if config.experts is None:
        return (attention + 3 * config.hidden_size * config.intermediate_size) * form.weights.number_bytes
    router = config.hidden_size * config.experts.num_experts * _ROUTER_BYTES
    experts = 3 * num_experts * config.hidden_size * config.experts.intermediate_size
    return (attention + experts) * form.weights.number_bytes + router


def _head_bytes(config: ModelConfig) -> float:
    return 2.0 * config.vocab_size * config.embedding_size


def _token_bytes(form: ModelForm) -> int:
    return form.config.block_layout(16, form.cache or form.config.dtype).token_bytes


def _cache_bytes(form: ModelForm, step: StepForm) -> float:
    return step.num_decodes * step.context_len * _token_bytes(form)


LAUNCH_S = 1.5e-6  # from a kernel to the next of a graph: an estimate, NVIDIA tells none for such kernels
HOST_LAUNCH_S = 10e-6  # of the host, for a kernel outside of graphs: an estimate, Triton's launcher is in Python
USABLE = 0.9  # of a GPU's memory, for weights and cache

HELD, MISSED = "held", "missed"
_FLOAT8_PRODUCT = "_scaled_mm"
_COLUMNS = (ONE, FEW, CHATS, LONG, MANY)


class Gpu(NamedTuple):
    """A GPU by its data sheet."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    operations_per_s: float  # of products in bfloat16
    float8_per_s: float  # of FP8; 0: it has none


GPUS = (
    Gpu("H100 SXM", 80e9, 3.35e12, 989e12, 1979e12),
    Gpu("H200", 141e9, 4.8e12, 989e12, 1979e12),
    Gpu("A100 80 GB", 80e9, 2.04e12, 312e12, 0.0),
    Gpu("L40S", 48e9, 0.864e12, 362e12, 733e12),
)


def step_seconds(step: LedgerStep, gpu: Gpu) -> float:
    """Return the least seconds of a step, the pauses between kernels included."""
    parts = ((1, step.first), (step.layers - 1, step.layer))
    seconds = step.kernels * LAUNCH_S
    for times, part in parts:
        for name, one in part.items():
            if name not in (TO_GPU, TO_HOST):
                rate = gpu.float8_per_s if name.startswith(_FLOAT8_PRODUCT) else gpu.operations_per_s
                seconds += times * max((one.read + one.written) / gpu.bytes_per_s, one.operations / rate)
    return max(seconds, (step.kernels - step.recorded) * HOST_LAUNCH_S)


class Target(NamedTuple):
    """A figure that a step is to have."""

    what: str
    limit: str
    value: float
    is_held: bool
    cause: str  # of a miss


def targets(ledger: Ledger) -> Iterator[Target]:
    dense = ledger[DENSE.name]
    gpu = GPUS[0]

    def at_most(what: str, limit: float, value: float, cause: str = "") -> Target:
        return Target(what, f"{limit:g}", value, value <= limit, "" if value <= limit else cause)

    ratio = dense[MANY.name].num_bytes / ideal_bytes(DENSE, MANY)
    yield at_most("8B in bfloat16, 256 x 1 024: bytes over weights and cache", 1.15, ratio)
    yield at_most("the same: kernels of a layer", 12, dense[MANY.name].layer_kernels)
    waits = dense[MANY.name].idle_waits + dense[MANY.name].host_reads
    yield at_most("the same, launched ahead: waits of the host with nothing queued", 0, waits)
    for form, limit in ((NARROW, 0.62), (NARROWER, 0.5)):
        for step in (MANY, CHATS, FEW):
            own, plain = (step_seconds(ledger[one.name][step.name], gpu) for one in (form, DENSE))
            least = ideal_bytes(form, step) / ideal_bytes(DENSE, step)
            cause = f"weights and cache alone give {least:.2f}"
            what = f"{form.name}, {_size(step)}: step on an {gpu.name}, of bfloat16's"
            yield at_most(what, limit, own / plain, cause)
    for step in (FEW, CHATS, MANY):
        ratio = ledger[QWEN3.name][step.name].num_bytes / ideal_bytes(QWEN3, step)
        yield at_most(f"Qwen3-30B-A3B, {_size(step)}: bytes over chosen experts, the rest and cache", 1.2, ratio)


def targets_table(ledger: Ledger) -> str:
    lines = ["| figure | at most | by the ledger | |", "|---|---|---|---|"]
    for one in targets(ledger):
        verdict = HELD if one.is_held else f"{MISSED}: {one.cause}"
        value = f"{one.value:.0f}" if float(one.value).is_integer() else f"{one.value:.2f}"
        lines.append(f"| {one.what} | {one.limit} | {value} | {verdict} |")
    return "\n".join(lines) + "\n"


def estimates_table(ledger: Ledger) -> str:
    headings = ["GPU", "model", *map(_size, _COLUMNS), "prompt", "mixed"]
    lines = [_row(headings), "|---" * len(headings) + "|"]
    for gpu in GPUS:
        name = gpu.name
        for form in MODELS:
            cells = [_cell(ledger, gpu, form, step) for step in (*_COLUMNS, PROMPT, MIXED_AHEAD)]
            if any(cells):
                lines.append(_row([name, form.name, *cells]))
                name = ""
    return "\n".join(lines) + "\n"


def steps_table(ledger: Ledger) -> str:
    """Return kernels, bytes and waits of each model's steps."""
    lines = ["| model | step | kernels | of a layer | GB | over ideal | waits |", "|---" * 7 + "|"]
    for form in MODELS:
        name = form.name
        for step in (PROMPT, MIXED_AHEAD, MANY):
            own = ledger[form.name][step.name]
            ideal = f"{own.num_bytes / ideal_bytes(form, step):.2f}" if step is MANY else ""
            waits = f"{own.idle_waits + own.host_reads}"
            sizes = [str(own.kernels), str(own.layer_kernels), f"{own.num_bytes / 1e9:.1f}", ideal, waits]
            lines.append(_row([name, step.name, *sizes]))
            name = ""
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(ledger: Ledger, gpu: Gpu, form: ModelForm, step: StepForm) -> str:
    if memory_bytes(form, step) > USABLE * gpu.memory_bytes:
        return ""
    if form in (NARROW, NARROWER) and not gpu.float8_per_s:
        return ""
    milliseconds = step_seconds(ledger[form.name][step.name], gpu) * 1e3
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _size(step: StepForm) -> str:
    return f"{step.num_decodes} x {step.context_len:,}".replace(",", " ")


def main() -> None:
    """Print the tables."""
    parser_of(__doc__).parse_args()
    ledger = read()
    for table in (targets_table, steps_table, estimates_table):
        print(table(ledger))


if __name__ == "__main__":
    main()

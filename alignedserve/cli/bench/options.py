"""Options of `alignedserve bench`, one dataclass per command: a field is an option, its default is the option's.

Loads nothing heavy, so that `--help` answers at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import JsonFlag, ModelOption, SeedOption, UrlOption
from alignedserve.core.errors import ConfigError

DeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of `bench serve`."""

    url: UrlOption = DEFAULT_URL
    model: ModelOption = None
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat"
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Azure, BurstGPT or own CSV, Mooncake JSONL; also gzipped.", exists=True, dir_okay=False
        ),
    ] = None
    synthetic: Annotated[
        str | None, typer.Option("--synthetic", metavar="SPEC", help="Made-up traffic; the grammar stands above.")
    ] = None
    num_requests: Annotated[int | None, typer.Option("--num-requests", min=1, help="Send at most this many.")] = None
    start_s: Annotated[float, typer.Option("--start", min=0.0, help="Trace: begin at this second.")] = 0.0
    duration_s: Annotated[
        float | None,
        typer.Option("--duration", min=0.001, help="Trace: seconds of it to play. Synthetic: end of arrivals."),
    ] = None
    rate: Annotated[float | None, typer.Option(min=0.001, help="Trace: stretch to this mean rate (1/s).")] = None
    rate_scale: Annotated[float, typer.Option(min=0.001, help="Trace: arrivals this many times as fast.")] = 1.0
    prompt_scale: Annotated[float, typer.Option(min=0.001, help="Multiply prompt lengths.")] = 1.0
    output_scale: Annotated[float, typer.Option(min=0.001, help="Multiply output lengths.")] = 1.0
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Clamp prompts to this many tokens.")] = None
    max_output: Annotated[int | None, typer.Option(min=1, help="Clamp outputs to this many tokens.")] = None
    output_len: Annotated[str, typer.Option(help="exact: send max_tokens; free: let the model decide.")] = "exact"
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--honour-eos", help="Go on to max_tokens whatever the model says.")
    ] = False
    cuts_off: Annotated[
        bool,
        typer.Option("--cut-off/--wait", help="At the end give up closed-loop requests still in the air, uncounted."),
    ] = False
    slo_ttft_s: Annotated[float | None, typer.Option("--slo-ttft", min=0.0, help="Seconds to the first token.")] = None
    slo_tpot_s: Annotated[float | None, typer.Option("--slo-tpot", min=0.0, help="Mean seconds between tokens.")] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer.json: prompts of exact length.", file_okay=False)
    ] = None
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.001, help="Give a request up after this long.")] = 600.0
    seed: SeedOption = 0
    json_target: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the report as JSON.")] = (
        None
    )

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.synthetic is None):
            raise ConfigError("give either --trace or --synthetic")
        if self.rate is not None and self.rate_scale != 1.0:
            raise ConfigError("give either --rate or --rate-scale")
        if self.synthetic is not None and (self.rate is not None or self.rate_scale != 1.0 or self.start_s):
            raise ConfigError("--rate, --rate-scale and --start belong to --trace; a synthetic class has its own rate=")
        if self.endpoint not in ("chat", "completions"):
            raise ConfigError(f"--endpoint {self.endpoint}: must be chat or completions")
        if self.output_len not in ("exact", "free"):
            raise ConfigError(f"--output-len {self.output_len}: must be exact or free")
        if self.ignore_eos and self.output_len == "free":
            raise ConfigError("--ignore-eos needs --output-len exact: without a limit no answer would end")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `bench engine`; None: what suits the device."""

    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Named shape with random weights.", show_default="opt-125m; GPU: llama-3-8b"),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder, GGUF file, pocket or smollm2, in place of a shape.")
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(
            help="Requests x prompt tokens : output tokens, a comma between groups; or w1, w2, w3, w4, one; or "
            "iterations: single ones, against what the device can do.",
            show_default="w1; GPU: iterations",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="float32; GPU: bfloat16"),
    ] = None
    quantization: Annotated[
        str | None, typer.Option(help="Of linear layers: int8; of a shape also blocks, as Q4_1.")
    ] = None
    kv_cache_dtype: Annotated[str, typer.Option(help="Keys and values: auto (dtype), int8, on GPUs fp8.")] = "auto"
    device: DeviceOption = "auto"
    tensor_parallel: Annotated[
        int, typer.Option(min=1, max=64, help="Ranks, which share cores or have a GPU each; not of iterations.")
    ] = 1
    attention_backend: Annotated[str, typer.Option(help="auto, triton, torch or an instruction set of the CPU.")] = (
        "auto"
    )
    seed: SeedOption = 0
    json_output: JsonFlag = False

    def __post_init__(self) -> None:
        if self.shape is not None and self.model is not None:
            raise ConfigError("give either --shape or --model")
        if self.workload == "iterations" and self.tensor_parallel > 1:
            raise ConfigError("--workload iterations: is of one rank; leave --tensor-parallel out")


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of `bench kernels`."""

    device: DeviceOption = "auto"
    shape: Annotated[str, typer.Option(help="Named shape whose heads and widths are used.")] = "llama-3-8b"
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16"
    is_toy: Annotated[bool, typer.Option("--toy", help="Sizes that show only whether everything runs.")] = False
    json_output: JsonFlag = False


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of `bench schedule`."""

    pool_sizes: Annotated[str, typer.Option("--pool-sizes", help="Requests in the pool; a comma separates runs.")] = (
        "1000,10000,100000"
    )
    lengths: Annotated[str, typer.Option(help="azure (the trace that ships), lognormal, uniform or one.")] = "azure"
    max_blocks: Annotated[int, typer.Option(min=1, help="Blocks of a batch.")] = 1000
    max_requests: Annotated[int, typer.Option(min=1, help="Requests of a batch.")] = 128
    min_requests: Annotated[int, typer.Option(min=1, help="Requests that a batch should have.")] = 36
    seed: SeedOption = 0
    json_output: JsonFlag = False


@dataclass(frozen=True, slots=True)
class PredictorOptions:
    """Options of `bench predictor`."""

    texts: Annotated[
        tuple[Path, ...],
        typer.Option(help="JSON lines with prompt and response, or instruction, input and output; may be repeated."),
    ] = ()
    stored: Annotated[
        tuple[int, ...],
        typer.Option(help="Finished requests in the store; may be repeated. 100, 10000 and 20000."),
    ] = ()
    seed: SeedOption = 0
    json_output: JsonFlag = False


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of `bench transfer`; None: what suits the device."""

    shapes: Annotated[
        str | None,
        typer.Option(
            help="Models whose KV blocks are moved, by comma.",
            show_default="pocket,opt-125m; of a GPU: opt-125m,llama-3-8b",
        ),
    ] = None
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of one request's blocks in MiB, by comma.", show_default="4,64; of a GPU: 64,512"),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians count.")] = 9
    device: DeviceOption = "auto"
    json_output: JsonFlag = False

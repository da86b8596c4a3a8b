"""Options of `alignedserve bench`, one dataclass per command: a field is an option, its default is the option's.

Loads nothing heavy, so that `--help` answers at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import ModelOption, UrlOption
from alignedserve.core.errors import ConfigError


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
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", min=1, metavar="N", help="Send at most this many.")
    ] = None
    start_s: Annotated[float, typer.Option("--start", min=0.0, metavar="S", help="Trace: begin at this second.")] = 0.0
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration", min=0.001, metavar="S", help="Trace: seconds of it to play. Synthetic: end of arrivals."
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(min=0.001, metavar="R", help="Trace: stretch to this mean rate (1/s).")
    ] = None
    rate_scale: Annotated[
        float, typer.Option(min=0.001, metavar="X", help="Trace: arrivals this many times as fast.")
    ] = 1.0
    prompt_scale: Annotated[float, typer.Option(min=0.001, metavar="X", help="Multiply prompt lengths.")] = 1.0
    output_scale: Annotated[float, typer.Option(min=0.001, metavar="X", help="Multiply output lengths.")] = 1.0
    max_prompt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Clamp prompts to this many tokens.")] = (
        None
    )
    max_output: Annotated[int | None, typer.Option(min=1, metavar="N", help="Clamp outputs to this many tokens.")] = (
        None
    )
    output_len: Annotated[str, typer.Option(help="exact: send max_tokens; free: let the model decide.")] = "exact"
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--honour-eos", help="Go on to max_tokens whatever the model says.")
    ] = False
    cuts_off: Annotated[
        bool,
        typer.Option(
            "--cut-off/--wait",
            help="At the end give up closed-loop requests still in the air: only their tokens count.",
        ),
    ] = False
    warm_up_s: Annotated[
        float,
        typer.Option(
            "--warm-up", min=0.0, metavar="S", help="What comes before this second does not count: only steady state."
        ),
    ] = 0.0
    slo_ttft_s: Annotated[
        float | None, typer.Option("--slo-ttft", min=0.0, metavar="S", help="Seconds to the first token.")
    ] = None
    slo_tpot_s: Annotated[
        float | None, typer.Option("--slo-tpot", min=0.0, metavar="S", help="Mean seconds between tokens.")
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer.json: prompts of exact length.", file_okay=False)
    ] = None
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="S", help="Give a request up after this long.")
    ] = 600.0
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same arrivals and lengths.")] = 0
    prompt_seed: Annotated[
        int | None,
        typer.Option(
            "--prompt-seed",
            help="The same texts again. Without it each run has new ones, so that no cache remembers the run before.",
        ),
    ] = None
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
        if self.duration_s is not None and self.warm_up_s >= self.duration_s:
            raise ConfigError("--warm-up must be shorter than --duration: nothing would be left to count")
        if self.endpoint not in ("chat", "completions"):
            raise ConfigError(f"--endpoint {self.endpoint}: must be chat or completions")
        if self.output_len not in ("exact", "free"):
            raise ConfigError(f"--output-len {self.output_len}: must be exact or free")
        if self.ignore_eos and self.output_len == "free":
            raise ConfigError("--ignore-eos needs --output-len exact: without a limit no answer would end")


@dataclass(frozen=True, slots=True)
class VersusOptions:
    """Options of `bench versus`."""

    servers: Annotated[tuple[str, ...], typer.Argument(metavar="SERVER...", help="NAME=COMMAND or NAME=URL.")]
    loads: Annotated[
        tuple[str, ...],
        typer.Option("--load", metavar="LABEL=SPEC", help="A load as `bench serve` takes it; without any, six usual."),
    ] = ()
    rounds: Annotated[int, typer.Option(min=1, help="Times that each server is started.")] = 2
    duration_s: Annotated[float, typer.Option("--duration", min=1.0, metavar="S", help="Measured of each load.")] = 30.0
    warm_up_s: Annotated[float, typer.Option("--warm-up", min=0.0, metavar="S", help="Before it, not counted.")] = 10.0
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "completions"
    max_prompt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Clamp prompts to so many tokens.")] = None
    max_output: Annotated[int | None, typer.Option(min=1, metavar="N", help="Clamp outputs to so many tokens.")] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer.json: prompts of exact length.", file_okay=False)
    ] = None
    start_timeout_s: Annotated[
        float, typer.Option("--start-timeout", min=1.0, metavar="S", help="Until a server answers.")
    ] = 600.0
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same arrivals and lengths.")] = 0
    json_target: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write all runs as JSON.")] = None

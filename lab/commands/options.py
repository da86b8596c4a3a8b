"""Options of `alignedserve eval`, `demo` and `profile`, one dataclass each; loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import BatchingOption, ConfigOption, JsonFlag, SeedOption, SetOption, UrlOption
from alignedserve.core.errors import ConfigError

# By suite. A model of 135 million parameters knows little and cannot add: its questions show that the served model is
# whole, not that it is good.
EVAL_THRESHOLDS = {"pocket": 0.9, "smollm2": 0.2}


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of `alignedserve eval`."""

    suite: Annotated[
        str, typer.Argument(help="What to ask: pocket (its tasks) or smollm2 (questions for instruct models).")
    ] = "pocket"
    url: UrlOption = DEFAULT_URL
    num_per_skill: Annotated[int, typer.Option(min=1, help="Tasks per skill and per context length.")] = 50
    seed: SeedOption = 0
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in the air at a time.")] = 8
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="A skill below this share makes exit code 1.", show_default="0.9; of smollm2 0.2"
        ),
    ] = None
    show_failures: Annotated[int, typer.Option(min=0, metavar="N", help="List up to N wrong answers.")] = 0
    json_output: JsonFlag = False

    def __post_init__(self) -> None:
        if self.suite not in EVAL_THRESHOLDS:
            raise ConfigError(f"there is no suite {self.suite!r}; there are: {', '.join(EVAL_THRESHOLDS)}")

    @property
    def least_share(self) -> float:
        return EVAL_THRESHOLDS[self.suite] if self.threshold is None else self.threshold


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `alignedserve demo`."""

    duration_s: Annotated[float, typer.Option("--duration", min=1.0, help="Seconds of arrivals.")] = 120.0
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, help="Mean requests per second.", show_default="what two cores hold"),
    ] = None
    url: Annotated[str | None, typer.Option("--url", help="Use this running server and do not start one.")] = None
    config: ConfigOption = None
    overrides: SetOption = ()
    is_mixed: Annotated[
        bool, typer.Option("--mixed", help="Nine short prompts to a long one, instead of the trace's own.")
    ] = False
    has_faults: Annotated[
        bool, typer.Option("--faults", help="Kill and stop workers (and pool) meanwhile, one after the other.")
    ] = False
    batching: BatchingOption = None
    seed: SeedOption = 0
    json_output: JsonFlag = False

    def __post_init__(self) -> None:
        if self.url is not None and self.has_faults:
            raise ConfigError("--faults hurts a cluster that the demo starts; --url names a running one")
        if self.url is not None and (self.config is not None or self.overrides or self.batching is not None):
            raise ConfigError("--config and --set belong to a cluster that the demo starts; --url names a running one")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of `alignedserve profile`."""

    model: Annotated[
        str, typer.Argument(help="Model folder, GGUF file, pocket, smollm2, or a shape with random weights (opt-125m).")
    ]
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    device: Annotated[str, typer.Option(help="cpu, cuda (the first GPU) or cuda:N.")] = "cpu"
    num_threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of a pass.", show_default="all cores")
    ] = None
    duration_s: Annotated[float, typer.Option("--duration", min=1.0, help="Seconds of measuring.")] = 90.0
    is_quick: Annotated[bool, typer.Option("--quick", help="Short for --duration 15.")] = False
    is_cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count processor time: for a busy machine; needs --threads 1.")
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", dir_okay=False, help="Write the profile; its name is then fitted:FILE."
        ),
    ] = None
    json_output: JsonFlag = False

"""Options of the commands, one dataclass each: a field is an option, its default is the option's.

Loads nothing heavy, so that `--help` answers at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import (
    BatchingOption,
    ConfigOption,
    JsonFlag,
    LogFormatOption,
    ModelOption,
    SeedOption,
    SetOption,
    UrlOption,
)
from alignedserve.config.overrides import override_of
from alignedserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `alignedserve serve`; `all_overrides` has the options that stand for a `--set`."""

    models: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="[NAME=]MODEL",
            help="Model folder, GGUF file, ORG/NAME[:QUANTISATION]\\[@REVISION] on a Hugging Face hub, a short name "
            "such as smollm2 or qwen3, or pocket for the model that comes with AlignedServe; several share machines.",
        ),
    ] = ()
    config: ConfigOption = None
    overrides: SetOption = ()
    port: Annotated[int | None, typer.Option("--port", help="Short for --set gateway.port=PORT.")] = None
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME", help="Scheduling policy: short for --set scheduling.policy=NAME."),
    ] = None
    batching: BatchingOption = None
    quantization: Annotated[
        str | None, typer.Option("--quantization", metavar="int8", help="Short for --set model.quantization=int8.")
    ] = None
    lora_modules: Annotated[
        tuple[str, ...],
        typer.Option("--lora-modules", metavar="NAME=DIR", help="Adapter: short for --set lora.adapters.NAME=DIR."),
    ] = ()
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="DIR", help="Short for --set recording.folder=DIR; see `alignedserve replay`."
        ),
    ] = None
    log_format: LogFormatOption = None
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", min=1, help="On the Ray cluster that RAY_ADDRESS names: wait for so many nodes."
        ),
    ] = None

    @property
    def named_models(self) -> tuple[str, ...]:
        """Return the models where they are several or have names; empty: one at most, which an override gives."""
        return self.models if len(self.models) > 1 or any("=" in model for model in self.models) else ()

    @property
    def all_overrides(self) -> list[str]:
        """Return the overrides that the short options stand for, then those given by `--set`; later ones win."""
        record = None if self.record is None else str(self.record)
        short = {
            "model.path": self.models[0] if self.models and not self.named_models else None,
            "gateway.port": self.port,
            "batching.policy": self.batching,
            "scheduling.policy": self.policy,
            "model.quantization": self.quantization,
            "recording.folder": record,
        }
        named = [override_of(field, value) for field, value in short.items() if value is not None]
        return [*named, *self._adapters(), *self.overrides]

    def _adapters(self) -> list[str]:
        pairs = [module.partition("=") for module in self.lora_modules]
        if not all(name and path for name, _, path in pairs):
            raise ConfigError("--lora-modules takes NAME=DIR")
        names = [name for name, _, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules names {name} twice")
        return [override_of("lora.adapters", {name: path for name, _, path in pairs})] if pairs else []


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # by OpenAI's names


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `alignedserve chat`."""

    url: UrlOption = DEFAULT_URL
    model: ModelOption = None
    once: Annotated[
        str | None,
        typer.Option(
            "--once",
            metavar="PROMPT",
            help="Answer one prompt and leave; - reads it from stdin, whole. From a pipe each line is a turn.",
        ),
    ] = None
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None
    reasoning_effort: Annotated[
        str | None,
        typer.Option(metavar="LEVEL", help=f"How much the model thinks before it answers: {', '.join(EFFORTS)}."),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=2.0,
            help="0 always takes the likeliest token: the same answer every time.",
            show_default="as the model's makers say",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer.", show_default="1024, at most a quarter of the context"),
    ] = None


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


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of `alignedserve quantize`."""

    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model folder with plain weights.")]
    form: Annotated[str, typer.Option("--to", metavar="q4_k|int8|mxfp4", help="What weights are rounded to.")]
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Where to.", show_default="FOLDER's name and the form"),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="What perplexities are of.", show_default="a text that is shipped"),
    ] = None
    json_output: JsonFlag = False

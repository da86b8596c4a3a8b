"""Options that several commands share, and commands made from option dataclasses."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.config.overrides import override_of
from alignedserve.core.errors import ConfigError

ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="ID", help="Its run folder's name, where several serve here.")
]
UrlOption = Annotated[
    str, typer.Option("--url", help="Address of the server. Its key is read from ALIGNEDSERVE_API_KEY.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model name.", show_default="the first the server lists")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ProcessesOption = Annotated[int | None, typer.Option(min=1, help="Simulations at a time.", show_default="one per core")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same requests.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with the configuration.")]
BatchingOption = Annotated[
    str | None,
    typer.Option(
        "--batching", metavar="fcfs|density_first", help="Batches of separate workers: --set batching.policy=NAME."
    ),
]
LogFormatOption = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="text|json",
        help="Logs of all processes; json: an object per line.",
        show_default="as ALIGNEDSERVE_LOG_FORMAT says, else text",
    ),
]
SetOption = Annotated[
    tuple[str, ...],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one field of the configuration (repeatable)."),
]


def takes_options(run: Callable[[Any], None]) -> Callable[..., None]:
    """Build a Typer command from a function of one options dataclass, whose fields become the parameters. A field of
    type `tuple[X, ...]` becomes an option that may be repeated."""
    (options_class,) = (parameter.annotation for parameter in signature(run).parameters.values())
    parameters = _parameters_of(options_class)
    repeated = set()
    for name, parameter in parameters.items():
        hint, *metadata = get_args(parameter.annotation)
        if get_origin(hint) is tuple:
            of_lists: Any = Annotated[GenericAlias(list, get_args(hint)[0]), *metadata]  # the form that Typer knows
            parameters[name] = parameter.replace(annotation=of_lists, default=None)
            repeated.add(name)

    def command(**given: Any) -> None:
        run(options_class(**{name: tuple(value or ()) if name in repeated else value for name, value in given.items()}))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return command


def _parameters_of(options_class: type) -> dict[str, Parameter]:
    hints = get_type_hints(options_class, include_extras=True)
    defaults = {
        field.name: Parameter.empty if field.default is MISSING else field.default for field in fields(options_class)
    }
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    }


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
    upstream: Annotated[
        tuple[str, ...],
        typer.Option(
            "--upstream",
            metavar="URL",
            help="Serve no model here, but stand before this OpenAI-compatible server (repeatable).",
        ),
    ] = ()
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="vllm", help="Serve by vLLM, our scheduler inside: its command or path."),
    ] = None
    engine_args: Annotated[
        str, typer.Option("--engine-args", metavar="ARGS", help="Further arguments of `vllm serve`, as in a shell.")
    ] = ""
    engine_count: Annotated[
        int, typer.Option("--engine-count", metavar="N", min=1, max=64, help="Of each model: so many vLLMs.")
    ] = 1
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
class ChatCommandOptions:
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
        int | None, typer.Option(min=1, help="Longest answer.", show_default="1024, at most a quarter of the context")
    ] = None


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

"""Options that several commands share, and commands made from option dataclasses."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

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
    """Build a Typer command from a function of one options dataclass, whose fields become the parameters.

    A field of type `tuple[X, ...]` becomes an option that may be repeated.
    """
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

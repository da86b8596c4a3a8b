"""Options of `alignedserve keys`; the import of the commands' module is inside each function, as in main.py."""

from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.options import JsonFlag

keys_app = typer.Typer(
    help="Keys of clients, their rights and limits, in the file that gateway.keys_file names.", no_args_is_help=True
)

_FileOption = Annotated[Path, typer.Option("--file", metavar="PATH", help="The file of keys.")]
_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As logs, usage and refusals call the client.")]
_ExpiresOption = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="End of the secret: 90d, 12h or 2027-01-31.")
]
_FILE = Path("keys.yaml")


def _limit(name: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, min=1, metavar="N", help=text)
    return option


@keys_app.command("add")
def add(
    name: _NameArgument,
    file: _FileOption = _FILE,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier", help="Tier it may have: default, flex, priority (repeatable).", show_default="default and flex"
        ),
    ] = None,
    default_tier: Annotated[str | None, typer.Option(help="Tier of requests that name none.")] = None,
    priorities: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Priorities that it may send; smaller goes first.", show_default="0:1000"),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Model it may use, or ABC* (repeatable).", show_default="all")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Its share beside other keys.", show_default="1")] = None,
    requests_per_minute: Annotated[int | None, _limit("--requests-per-minute", "Requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, _limit("--tokens-per-minute", "Tokens a minute, answers too.")] = None,
    open_requests: Annotated[int | None, _limit("--open-requests", "Requests open at once.")] = None,
    enqueued_batch_tokens: Annotated[
        int | None, _limit("--enqueued-batch-tokens", "Tokens of batches that wait.")
    ] = None,
    may_see_usage: Annotated[
        bool | None, typer.Option("--may-see-usage", help="It sees the usage of all keys, beside its own.")
    ] = None,
    has_no_secret: Annotated[
        bool, typer.Option("--no-secret", help="Only tokens (gateway.jwt) stand for it, until `rotate`.")
    ] = False,
    expires: _ExpiresOption = None,
) -> None:
    """Add a key and print its secret, once."""
    from alignedserve.cli.keys.commands import add as run

    row = {
        "tiers": tuple(tier) if tier else None,
        "default_tier": default_tier,
        "priorities": priorities,
        "models": tuple(model) if model else None,
        "weight": weight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "open_requests": open_requests,
        "enqueued_batch_tokens": enqueued_batch_tokens,
        "may_see_usage": may_see_usage,
    }
    run(file, name, {field: value for field, value in row.items() if value is not None}, expires, has_no_secret)


@keys_app.command("list")
def show_list(file: _FileOption = _FILE, json_output: JsonFlag = False) -> None:
    """List the keys with their rights and limits, never a secret."""
    from alignedserve.cli.keys.commands import show_list as run

    run(file, json_output)


@keys_app.command("revoke")
def revoke(name: _NameArgument, file: _FileOption = _FILE) -> None:
    """Refuse all secrets of a key within a second. Its batches go on; a new secret (`rotate`) reads the stored
    results."""
    from alignedserve.cli.keys.commands import revoke as run

    run(file, name)


@keys_app.command("rotate")
def rotate(
    name: _NameArgument,
    file: _FileOption = _FILE,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the present secrets are still good: 24h, 7d, 0.")
    ] = "24h",
    expires: _ExpiresOption = None,
) -> None:
    """Print a new secret of a key, shown this once; the present ones end a little later."""
    from alignedserve.cli.keys.commands import rotate as run

    run(file, name, overlap, expires)

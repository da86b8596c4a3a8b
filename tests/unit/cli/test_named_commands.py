"""Commands and options that pages name exist, the README names all commands, and help shows its texts whole."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from alignedserve.cli.main import app
from tests.support.marks import each

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
_NAMES = "|".join(map(re.escape, COMMANDS))
_CALLED = re.compile(rf"(?:\balignedserve |`)((?:{_NAMES}) [^\n`#|;&]*)")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_pages_name_exist(page: Path) -> None:
    called = _CALLED.findall(page.read_text(encoding="utf-8").replace("\\\n", " "))
    assert [line for line in called if not set(_OPTION.findall(line)) <= set(_options(line.split()))] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"[a-z]+(?:-[a-z]+)*", " ".join(re.findall(r"^\| (`alignedserve [^|]*) \|", text, re.MULTILINE)))
    )
    assert sorted(COMMANDS.keys() - named) == []


def test_help_shows_what_a_model_is_called_by() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert "ORG/NAME[:QUANTISATION][@REVISION]" in shown


def _options(words: list[str]) -> Iterator[str]:
    yield "--help"
    command: Any = COMMANDS[words[0]]
    for word in words[1:]:
        if word not in getattr(command, "commands", ()):
            break
        command = command.commands[word]
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)

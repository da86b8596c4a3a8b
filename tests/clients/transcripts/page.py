"""The page of transcripts: which script shows which client, and how the page is laid out."""

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

CLIENTS = Path(__file__).parents[1]
PAGE = CLIENTS.parents[1] / "docs/transcripts.md"
SCRIPTS = Path(__file__).parent / "scripts"
DRIVERS = CLIENTS / "drivers"
_TOLD_WIDTH = 100  # characters of what a driver told, in a row of the table
_MAX_WIDTH = 120  # of a line that a client printed
_SHOWN = "--- shown\n"  # ends the comment in a script behind which its shown part begins

_HEAD = """\
# Transcripts

Each SDK against `alignedserve serve pocket`: the client's code, and what it printed.
`python -m tests.clients.transcripts` runs all of it and writes this page; it needs package
registries once, as `make test-clients` does. Servers are found by `OPENAI_BASE_URL`
(`http://localhost:8000/v1`) and `ANTHROPIC_BASE_URL` (`http://localhost:8000`), keys are `none`.

The pocket model spells and counts. It was not trained for tools, so calls are forced and written as
`model.tool_format=hermes` says: grammars make them right in form, and which word is spelled means
nothing. `Animal` has a `name`, cat or dog, and `legs`. Imports and classes are left out here; whole
scripts are in `tests/clients/transcripts/scripts/`, and [Clients](clients.md) has a snippet for each.
"""

_DRIVERS_HEAD = """\
## What the tests' drivers told

The drivers of `make test-clients`, in `tests/clients/drivers/`, in the same run: the beginning of
the JSON that each printed, which the tests check.

| driver | told |
|---|---|
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """One client on the page."""

    title: str
    package: str  # as its registry names it
    script: str  # its file in the folder of scripts


SHOWN = (
    Shown("OpenAI's SDK for Python", "openai", "openai_python.py"),
    Shown("OpenAI's SDK for Node", "openai", "openai_node.mjs"),
    Shown("Anthropic's SDK for Python", "anthropic", "anthropic_python.py"),
    Shown("Anthropic's SDK for Node", "@anthropic-ai/sdk", "anthropic_node.mjs"),
    Shown("OpenAI's Agents SDK", "openai-agents", "agents_loop.py"),
    Shown("LangChain", "langchain-openai", "langchain_tools.py"),
    Shown("LiteLLM", "litellm", "litellm_calls.py"),
    Shown("Vercel's AI SDK", "ai", "vercel_objects.mjs"),
    Shown("pydantic-ai", "pydantic-ai-slim", "pydantic_objects.py"),
    Shown("instructor", "instructor", "instructor_animals.py"),
)


@dataclass(frozen=True, slots=True)
class Driven:
    """One run of a driver."""

    script: str  # its file in the folder of drivers
    argument: str = ""


DRIVEN = (
    Driven("openai_sdk.mjs"),
    Driven("openai_responses.mjs"),
    Driven("anthropic_sdk.mjs"),
    Driven("openai_tool_stream.py"),
    Driven("openai_agents.py", "chat"),
    Driven("openai_agents.py", "responses"),
    Driven("langchain_chat.py"),
    Driven("langchain_tools.py"),
    Driven("litellm_chat.py"),
    Driven("llama_index_chat.py"),
    Driven("pydantic_agents.py"),
    Driven("instructor_objects.py"),
    Driven("vercel_ai.mjs"),
    Driven("lm_eval_tasks.py", "MODEL_FOLDER"),
)


def version_of(shown: Shown) -> str:
    """Return the version that the clients' environments hold."""
    if shown.script.endswith(".mjs"):
        return str(json.loads((CLIENTS / "package.json").read_text())["dependencies"][shown.package])
    found = re.search(rf"^{re.escape(shown.package)}==(\S+)$", (CLIENTS / "requirements.txt").read_text(), re.MULTILINE)
    assert found is not None, f"{shown.package} is not among the clients' requirements"
    return found[1]


def section(shown: Shown, printed: str) -> str:
    """Return the client's part of the page: what it does, its code, and what it printed, long lines wrapped."""
    wrapper = textwrap.TextWrapper(_MAX_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    lines = map(wrapper.fill, printed.strip().splitlines())
    return f"{opening_of(shown)}\n```text\n" + "\n".join(lines) + "\n```\n"


def opening_of(shown: Shown) -> str:
    """Return the client's part of the page up to what it printed."""
    script = SCRIPTS / shown.script
    opening, _, rest = script.read_text(encoding="utf-8").partition("\n")
    _, marker, code = rest.partition(_SHOWN)
    assert marker, f"nothing is shown of {script.name}"
    language = "js" if script.suffix == ".mjs" else "python"
    says = opening.strip('"/ ')
    return f"## {shown.title}\n\n`{shown.package}` {version_of(shown)}. {says}\n\n```{language}\n{code.strip()}\n```"


def row(driven: Driven, told: str) -> str:
    """Return the driver's row of the table."""
    short = told if len(told) <= _TOLD_WIDTH else f"{told[:_TOLD_WIDTH]} ..."
    name = " ".join(filter(None, (driven.script, driven.argument)))
    return f"| `{name}` | `` {short.replace('|', chr(92) + '|')} `` |\n"


def page(sections: list[str], rows: list[str]) -> str:
    """Return the whole page."""
    return "\n".join((_HEAD, *sections, _DRIVERS_HEAD + "".join(rows)))

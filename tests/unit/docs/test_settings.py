"""The page of settings has all of them as the code has them, and settings that pages show are taken."""

import re
from pathlib import Path

from alignedserve.config import environment
from alignedserve.config.loading import load_config
from scripts.settings import PAGE, sections, with_settings
from tests.support.marks import each

ROOT = Path(__file__).parents[3]
_OF_THE_CHART = ROOT / "docs/kubernetes.md"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")})
PAGES.remove(_OF_THE_CHART)
_SET = re.compile(r"""--set[ =](?:'([^']*)'|"([^"]*)"|([^\s`|)'"]+))""")
_LEFT_OPEN = ("...", "$", "NAME")
_MISTAKES = ("gateway.prt=1",)  # that a page shows to be refused


def test_the_settings_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert with_settings(text) == text, "python -m scripts.settings writes them"
    assert [name for name in sections() if f"<!-- settings: {name} -->" not in text] == []


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    named = {value for name, value in vars(environment).items() if name.endswith("_VARIABLE")}
    read = (named | set(environment._AWS_VARIABLES)) - {environment.NODE_LOSSES_VARIABLE}  # which `serve` alone sets
    assert sorted(name for name in read if f"`{name}`" not in PAGE.read_text()) == []


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_pages_show_are_taken(page: Path) -> None:
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        load_config(None, [one for found in _SET.findall(line) if _is_setting(one := "".join(found))])


def _is_setting(text: str) -> bool:
    """Return whether it is one of a section, with a value: not one of a model by its name, nor one left open."""
    section = re.split(r"[.=]", text, maxsplit=1)[0]
    return section in {"topology", *sections()} and text not in _MISTAKES and not any(one in text for one in _LEFT_OPEN)

"""The page of transcripts is of the scripts, drivers and versions that are in the tree."""

import re
from pathlib import Path

from tests.clients.transcripts.page import DRIVEN, DRIVERS, PAGE, SCRIPTS, SHOWN, Shown, opening_of
from tests.support.marks import each

MAX_LINES = 300


def _scripts_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in (".py", ".mjs")}


def test_it_names_every_driver() -> None:
    named = set(re.findall(r"^\| `([\w.]+)", PAGE.read_text(), re.MULTILINE))
    assert named == {driven.script for driven in DRIVEN} == _scripts_in(DRIVERS)


def test_every_script_is_shown() -> None:
    assert {shown.script for shown in SHOWN} == _scripts_in(SCRIPTS)


@each("shown", SHOWN, ids=lambda shown: shown.script)
def test_code_and_version_are_those_of_the_run(shown: Shown) -> None:
    assert opening_of(shown) in PAGE.read_text()


def test_it_is_short_and_names_no_machine() -> None:
    page = PAGE.read_text()
    assert len(page.splitlines()) < MAX_LINES
    assert re.findall(r"/(?:tmp|home|root|work|Users)/|\b\d+\.\d+\.\d+\.\d+\b|https?://(?!localhost)", page) == []

"""Documentation, comments and docstrings name only what exists, and the documentation's lines fit a screen."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.weight import part_of, room_of
from tests.support.marks import each

ROOT = Path(__file__).parents[3]
PACKAGE_FOLDERS = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels", "lab", "plugins")
FOLDERS = (*PACKAGE_FOLDERS, "benchmarks", "docs", "examples", "experiments", "scripts", "tests")
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
MAX_WIDTH = 160

_CODE = re.compile(r"`([^`\s]+)`")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:/[\w.-]+)*/?")
_MODULE_FILE = re.compile(r"[\w/]+\.py")
_SAID_FILE = re.compile(r"[\w./-]*\w\.py\b")
_FILES_ELSEWHERE = ("setup.py", "routers/openai.py")  # at the root; of Open WebUI
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)$", re.MULTILINE)
_COMMAND = re.compile(r"python -m ((?:benchmarks|experiments|tests|alignedserve)(?:\.[a-z]\w*)*)(?!\.?\w)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)]+)\)")

per_page = each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@per_page
def test_named_files_exist(page: Path) -> None:
    assert [name for name in _named_paths(page) if not (ROOT / name).exists()] == []


@per_page
def test_named_modules_exist(page: Path) -> None:
    named = [name for name in _CODE.findall(page.read_text()) if _MODULE_FILE.fullmatch(name)]
    assert [name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in _modules())] == []


@per_page
def test_named_commands_exist(page: Path) -> None:
    modules = [ROOT / name.replace(".", "/") for name in _COMMAND.findall(page.read_text())]
    assert [
        path for path in modules if not (path / "__main__.py").exists() and not path.with_suffix(".py").exists()
    ] == []


@per_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in (*_LINK.findall(text), *_REFERENCE.findall(text)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@per_page
def test_anchors_are_headings(page: Path) -> None:
    anchors = [(page.parent / link if link else page, anchor) for link, anchor in _ANCHOR.findall(page.read_text())]
    assert [anchor for target, anchor in anchors if target.suffix == ".md" and anchor not in _anchors_of(target)] == []


@per_page
def test_lines_fit_a_screen(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > MAX_WIDTH] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link).resolve() for link in _LINK.findall(index.read_text())}
    assert [page for page in (ROOT / "docs").rglob("*.md") if page != index and page.resolve() not in linked] == []


def test_the_structure_shows_the_floors_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / ".importlinter.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("Imports only point"))
    rows = re.findall(r"^\| \d+ \| (.*) \|$", (ROOT / "docs/structure.md").read_text(), re.MULTILINE)
    assert [_CODE.findall(row) for row in rows] == [layer.split(" | ") for layer in layers]


def test_every_room_has_its_line_in_the_structure() -> None:
    described = set(_CODE.findall((ROOT / "docs/structure.md").read_text()))
    rooms = {room_of(path) for path in _modules() if part_of(path) == "core" and room_of(path).count("/") < 3}
    without_init = rooms - {"alignedserve", "alignedserve/runtime"}
    assert {room for room in without_init if not described & {room, room.removeprefix("alignedserve/")}} == set()


def test_the_door_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120


def test_comments_and_docstrings_name_files_that_exist() -> None:
    ends = {path[match.start() :] for path in _modules() for match in re.finditer(r"(?<![^/])", path)}
    named = [(path, name) for path in sorted(_modules()) for name in _SAID_FILE.findall(_said(ROOT / path))]
    assert [(path, name) for path, name in named if name not in ends and name not in _FILES_ELSEWHERE] == []


@functools.cache
def _modules() -> frozenset[str]:
    """Return every module of the project by its path, found once for all pages."""
    return frozenset(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _said(path: Path) -> str:
    """Return the comments and docstrings of a module; nothing of one that names no file."""
    text = path.read_text()
    if ".py" not in text:
        return ""
    strings = [
        one.value.value
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
    ]
    return "\n".join([*map(str, strings), *re.findall(r"#.*", text)])


def _named_paths(page: Path) -> Iterator[str]:
    for name in _CODE.findall(page.read_text()):
        if _PATH.fullmatch(name) and not name.endswith("/NAME"):
            yield name


def _anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = _HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_proxy_of_the_page_takes_rules_of_http() -> None:
    """HAProxy leaves them out with a warning where it only passes on bytes, as it does unless it is told."""
    page = (ROOT / "docs/hardening.md").read_text()
    (config,) = [block for block in page.split("```") if "http-request deny" in block]
    assert config.strip().startswith("defaults\n    mode http\n")

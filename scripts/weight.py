"""What the code weighs, by part and room: `python scripts/weight.py [--base REF] [--check]`.

Lines are those of the files; code lines have neither blank lines nor comments nor docstrings; tokens are Python's.
`--base` adds what has changed since a commit. `--check` fails where a room exceeds its row in scripts/budgets.toml.
A budget is raised in a commit of its own, which says what it buys and what became shorter for it.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "scripts" / "budgets.toml"
PARTS = {
    "core": ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels"),
    "laboratory": ("lab",),
    "plugins": ("plugins",),
    "measuring": ("benchmarks", "experiments"),
    "tests": ("tests",),
    "rest": ("scripts", "examples"),
}
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, slots=True)
class Weight:
    """What one file or several weigh."""

    files: tuple[int, ...] = ()  # lines of each file with any
    code: int = 0
    tokens: int = 0

    @property
    def lines(self) -> int:
        return sum(self.files)

    def __add__(self, other: "Weight") -> "Weight":
        return Weight(self.files + other.files, self.code + other.code, self.tokens + other.tokens)


def weigh(source: str) -> Weight:
    """Weigh one file."""
    lines = source.count("\n")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT and token.start not in docstrings
    ]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Weight((lines,) if lines else (), len(code), len(tokens))


def room_of(path: str) -> str:
    """Return the room of a file: its folder of the first level, in the runtime of the second."""
    folders = path.split("/")[:-1]
    if folders[0] in PARTS["core"] and folders[0] != "alignedserve":
        return folders[0]
    return "/".join(folders[: 3 if folders[:2] == ["alignedserve", "runtime"] else 2])


def weights(files: Iterable[tuple[str, str]]) -> dict[str, Weight]:
    """Return the weight of each room from paths and sources."""
    rooms: dict[str, Weight] = {}
    for path, source in files:
        if path.endswith(".py") and part_of(path) is not None:
            room = room_of(path)
            rooms[room] = rooms.get(room, Weight()) + weigh(source)
    return rooms


def part_of(path: str) -> str | None:
    """Return the part of the repository that a file or a room belongs to; None: it is not weighed."""
    return next((part for part, folders in PARTS.items() if path.split("/")[0] in folders), None)


def sum_of(part: str, rooms: dict[str, Weight]) -> Weight:
    """Return the weight of a part."""
    return sum((weight for room, weight in rooms.items() if part_of(room) == part), Weight())


def today() -> Iterable[tuple[str, str]]:
    """Yield the files of the checkout, edits included."""
    for path in _git("ls-files", "-co", "--exclude-standard", "--", "*.py").splitlines():
        if (ROOT / path).is_file():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def at(commit: str) -> Iterable[tuple[str, str]]:
    """Yield the files of a commit."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        for member in files:
            content = files.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name, content.read().decode()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def print_table(rooms: dict[str, Weight], base: dict[str, Weight] | None, limits: dict[str, int]) -> None:
    """Print a line for each room and part."""
    print(f"{'':34}{'files':>7}{'median':>8}{'lines':>9}{'budget':>9}{'code':>9}{'tokens':>10}{'added':>8}")
    for part in PARTS:
        names = sorted({room for room in (*rooms, *(base or ())) if part_of(room) == part})
        for name in [*names, part] if len(names) > 1 else [part]:
            weight = sum_of(part, rooms) if name == part else rooms.get(name, Weight())
            before = None if base is None else sum_of(part, base) if name == part else base.get(name, Weight())
            added = "" if before is None else f"{weight.lines - before.lines:+d}"
            middle = round(median(weight.files)) if weight.files else 0
            print(
                f"{name:34}{len(weight.files):7}{middle:8}{weight.lines:9}{limits.get(name, ''):>9}"
                f"{weight.code:9}{weight.tokens:10}{added:>8}"
            )


def excesses(rooms: dict[str, Weight], limits: dict[str, int]) -> list[str]:
    """Say which parts, and rooms of the core, weigh more than their budget or have none."""
    limited = {room: weight for room, weight in rooms.items() if part_of(room) == "core"}
    limited |= {part: sum_of(part, rooms) for part in PARTS}
    return [
        f"{name} has {weight.lines} lines; its budget is {limits.get(name, 'missing')} (scripts/budgets.toml)"
        for name, weight in limited.items()
        if weight.lines > limits.get(name, 0)
    ]


def main() -> int:
    """Print the table; 1 when `--check` finds a room above its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REF", help="also print what has changed since this commit")
    parser.add_argument("--check", action="store_true", help="print only what is above its budget")
    arguments = parser.parse_args()
    limits: dict[str, int] = tomllib.loads(BUDGETS.read_text())["lines"]
    rooms = weights(today())
    if not arguments.check:
        print_table(rooms, None if arguments.base is None else weights(at(arguments.base)), limits)
        return 0
    problems = excesses(rooms, limits)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Counts of hard sentences and empty names, kept below scripts/budgets.toml: `python scripts/sentences.py [--check]`.

A sentence of 10 to 45 words is heavy when a quarter of its words or more are pronouns and relatives. A local is vague
when its name says nothing about its value. A class name is shared when two public classes have it.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "scripts" / "budgets.toml"
PRODUCT = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels", "lab", "plugins")
PRONOUNS = frozenset(
    [
        "that",
        "those",
        "this",
        "these",
        "it",
        "its",
        "they",
        "them",
        "which",
        "whose",
        "what",
        "one",
        "ones",
        "other",
        "others",
        "such",
        "there",
        "so",
        "as",
        "who",
    ]
)
VAGUE = frozenset(["one", "own", "found", "told", "asked", "kept", "place", "given"])
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"*\[(]|$)")
_LINK, _CODE, _FENCE = re.compile(r"\[([^\]]*)\]\([^)]*\)"), re.compile(r"`[^`]*`"), re.compile(r"```.*?```", re.DOTALL)
_PARAGRAPH_OF_PAGE = re.compile(r"\n\s*\n|\n(?=\s*[-*|#]|\s*\d+\. )|\|")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
Finding = tuple[str, str]  # where, and the sentence or the name


def heavy_sentences(text: str) -> Iterator[str]:
    """Yield the heavy sentences of a paragraph."""
    plain = re.sub(r"\s+", " ", _LINK.sub(r"\1", _CODE.sub("code", text)))
    for sentence in _SENTENCE_END.split(plain):
        words = [word.lower() for word in _WORD.findall(sentence)]
        if 10 <= len(words) <= 45 and 4 * sum(word in PRONOUNS for word in words) >= len(words):
            yield sentence


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the paragraphs of all docstrings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from re.split(r"\n\s*\n", ast.get_docstring(node) or "")


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module; those of lines in a row are one."""
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(lines)


def vague_locals(tree: ast.Module) -> Iterator[str]:
    """Yield each assignment to a name that says nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.arg


def findings() -> dict[str, list[Finding]]:
    """Return what the lint finds in the checkout, by kind."""
    found: dict[str, list[Finding]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        where, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        found["docstrings"] += [(where, heavy) for text in docstrings(tree) for heavy in heavy_sentences(text)]
        found["comments"] += [(where, heavy) for text in comments(source) for heavy in heavy_sentences(text)]
        found["vague_locals"] += [(where, name) for name in vague_locals(tree)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(where)
    found["shared_class_names"] = [(" ".join(files), name) for name, files in classes.items() if len(files) > 1]
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        where = str(page.relative_to(ROOT))
        found["pages"] += [(where, heavy) for part in _PARAGRAPH_OF_PAGE.split(text) for heavy in heavy_sentences(part)]
    return found


def main() -> int:
    """Print counts and, of the kinds named, every finding; 1 when `--check` finds more than a budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("docstrings", "comments", "pages", "vague_locals", "shared_class_names")
    parser.add_argument("kinds", nargs="*", choices=[*kinds, []], help="print every finding of these")
    parser.add_argument("--check", action="store_true", help="print only what exceeds its budget")
    arguments = parser.parse_args()
    limits: dict[str, int] = tomllib.loads(BUDGETS.read_text())["words"]
    found = findings()
    for where, text in (finding for kind in arguments.kinds for finding in found[kind]):
        print(f"{where}: {text}")
    excess = [kind for kind in kinds if len(found[kind]) > limits[kind]]
    for kind in excess if arguments.check else kinds:
        print(f"{kind}: {len(found[kind])}, of {limits[kind]} that scripts/budgets.toml allows")
    return 1 if arguments.check and excess else 0


if __name__ == "__main__":
    sys.exit(main())

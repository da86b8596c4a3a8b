"""Writes the settings in docs/settings.md from the sections of the configuration: python -m scripts.settings."""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.config.sections import MIB, ClusterConfig, Section
from alignedserve.config.sections.gateway import JwtIssuer
from alignedserve.config.unset_sizes import SIZES
from benchmarks.measuring.arguments import parser_of

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_WIDTH = 118


def sections() -> dict[str, type[Section]]:
    """Return every section by its name, in the order of the configuration."""
    types = {field.name: field.type for field in msgspec.structs.fields(ClusterConfig)}
    named = {name: one for name, one in types.items() if isinstance(one, type) and issubclass(one, Section)}
    return {**named, "gateway.jwt": JwtIssuer}


def with_settings(page: str) -> str:
    """Return the page with the settings of each section behind its line `<!-- settings: NAME -->`."""
    for name, section in sections().items():
        page = _with_items(page, name, "".join(f"{item}\n" for item in _items(name, section)))
    return page


def _with_items(page: str, name: str, items: str) -> str:
    place = re.compile(rf"(?<=^<!-- settings: {re.escape(name)} -->\n\n)(?:[- ] .*\n)*", re.MULTILINE)
    return place.sub(lambda _: items, page)


def _items(name: str, section: type[Section]) -> Iterator[str]:
    said = _comments(section)
    for field in msgspec.structs.fields(section):
        default = "worked out" if field.name in SIZES.get(name, ()) else _shown_default(field)
        text = f"- `{field.name}` ({default})" + (f": {said[field.name]}" if said[field.name] else "")
        yield textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _shown_default(field: Any) -> str:
    """Return it as it may be written in a file; in words where there is none."""
    if field.required:
        return "to be set"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value in ((), {}):
        return "unset" if value is None else "none"
    if field.name.endswith("_bytes") and value and value % MIB == 0:
        return f"`{value // MIB}MiB`"
    shown = str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
    return f"`[{', '.join(value)}]`" if isinstance(value, tuple) else f"`{shown}`"


def _comments(section: type[Section]) -> dict[str, str]:
    """Return what the comments on and directly above each field of a section say."""
    source = textwrap.dedent(inspect.getsource(section))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef), "a section is no class"
    texts: dict[str, str] = {}
    last = 0
    for one in tree.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            above = " ".join(said[line] for line in range(last + 1, one.lineno) if line in said)
            beside = " ".join(said[line] for line in range(one.lineno, (one.end_lineno or 0) + 1) if line in said)
            texts[one.target.id] = " ".join(filter(None, (above, beside[:1].upper() + beside[1:] if above else beside)))
        last = one.end_lineno or last
    return texts


def main() -> None:
    """Write them."""
    parser_of(__doc__).parse_args()
    PAGE.write_text(with_settings(PAGE.read_text()))


if __name__ == "__main__":
    main()

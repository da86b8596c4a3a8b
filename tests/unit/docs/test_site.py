"""The site has every page, once, in the part of the users for whom it is."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
GROWING = ("policies", "experiments", "decisions")  # listed while the site is built


class _Loader(yaml.SafeLoader):
    """Reads the settings of Python's own, which are MkDocs' concern, as what they are written as."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages(entries: list[Any]) -> Iterator[str]:
    """Iterate over the pages of a part of the navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            (content,) = entry.values()
            yield from [content] if isinstance(content, str) else pages(content)


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    listed = Counter(pages(SITE["nav"]))
    assert {name for name in written if not name.startswith(GROWING)} | {"overview.md"} == set(listed)
    assert set(listed.values()) == {1}


def test_every_user_has_ten_minutes() -> None:
    titles = {
        name: title
        for part in SITE["nav"]
        for entry in next(iter(part.values()))
        if isinstance(entry, dict)
        for title, name in entry.items()
        if isinstance(name, str)
    }
    tutorials = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/tutorials").glob("*.md")}
    assert set(titles) == tutorials
    for name, title in titles.items():
        assert (ROOT / "docs" / name).read_text().startswith(f"# {title}\n")


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & SITE.keys()

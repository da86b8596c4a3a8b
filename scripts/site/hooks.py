"""Makes a site of pages that are written to be read in the repository: hooks of MkDocs, named in mkdocs.yml.

The README is a page of its own, `overview.md`. Links from a page to files that are no pages, such as sources, become
their paths, or links into the repository where `repo_url` is set.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_README = "overview.md"
_GROUPS = {"Policies": "policies", "Experiments": "experiments", "Decisions": "decisions"}
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_LIST_IN_PARAGRAPH = re.compile(r"^(?! *(?:[-*|>]|\d+\.) )(\S.*)\n(?=(?:-|1\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List all pages of the folders that grow: policies, experiments, decisions."""
    docs = Path(config.docs_dir)
    for entry in (entry for group in config.nav or [] for entries in group.values() for entry in entries):
        if isinstance(entry, dict):
            for name in entry.keys() & _GROUPS.keys():
                entry[name] = [
                    path.relative_to(docs).as_posix() for path in sorted((docs / _GROUPS[name]).glob("*.md"))
                ]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README, which is above the folder of pages."""
    root = Path(config.docs_dir).parent
    files.append(File.generated(config, _README, content=(root / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that a site can follow. Code in fences stays as it is."""
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _for_site(part, page, config, files) for part in parts)


def _for_site(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(found: re.Match[str]) -> str:
        is_image, title, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found.group(0)
        page_here = _page_at(_in_repository(page.file.src_uri, target), files)
        if page_here is not None:
            return (
                f"{is_image}[{title}]({relpath(page_here, str(PurePosixPath(page.file.src_uri).parent))}{anchor or ''})"
            )
        path = _in_repository(page.file.src_uri, target)
        if not (Path(config.docs_dir).parent / path).exists():
            return found.group(0)  # MkDocs says so
        if config.repo_url:
            return f"[{title}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return title if path in title.strip("`") else f"{title} (`{path}`)"

    # Python-Markdown begins a list only after an empty line, others at once.
    return _LINK.sub(link, _LIST_IN_PARAGRAPH.sub(r"\1\n\n", text))


def _in_repository(source: str, target: str) -> str:
    """Return the path, from the repository's top, of a page's link."""
    folder = "" if source == _README else str(PurePosixPath("docs", source).parent)
    return normpath(str(PurePosixPath(folder, target)))


def _page_at(path: str, files: Files) -> str | None:
    """Return the site's name of a file of the repository; None where it has none."""
    if path == "README.md":
        return _README
    name = path.removeprefix("docs/")
    if name == path:
        return None
    candidates: list[Any] = [name, f"{name}/README.md"]
    return next((one for one in candidates if files.get_file_from_path(one) is not None), None)

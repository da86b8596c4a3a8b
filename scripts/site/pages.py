"""Write the pages of the site, and its settings, from those of the repository: `python scripts/site/pages.py FOLDER`.

Pages are written to be read in the repository. Here the README becomes a page of its own, `overview.md`; links to
files that are no pages, such as sources, become their paths; and the folders that grow are listed in the navigation.
The settings are those of mkdocs.yml, which Zensical reads.
"""

import argparse
import re
import shutil
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[2]
DOCS, SETTINGS = ROOT / "docs", ROOT / "mkdocs.yml"
README = "overview.md"
GROUPS = {"Policies": "policies", "Experiments": "experiments", "Decisions": "decisions"}
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
LIST_IN_PARAGRAPH = re.compile(r"^(?! *(?:[-*|>]|\d+\.) )(\S.*)\n(?=(?:-|1\.) )", re.MULTILINE)
GROUP = re.compile(r"^( *)- (\w+): \[\]$", re.MULTILINE)


def write_site(folder: Path) -> None:
    """Write pages, pictures and settings into this folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.md"))
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        (pages / name).write_text(for_site(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    (pages / README).write_text(for_site((ROOT / "README.md").read_text(encoding="utf-8"), README), encoding="utf-8")
    (folder / SETTINGS.name).write_text(settings(SETTINGS.read_text(encoding="utf-8")), encoding="utf-8")


def settings(text: str) -> str:
    """Return the settings with every page of the folders that grow, and the folders that the site is made of."""
    listed = GROUP.sub(_group, text)
    return listed.replace("docs_dir: docs\n", "docs_dir: pages\n").replace("site_dir: build/site\n", "site_dir: site\n")


def _group(found: re.Match[str]) -> str:
    indent, title = found.groups()
    names = [path.relative_to(DOCS).as_posix() for path in sorted((DOCS / GROUPS[title]).glob("*.md"))]
    return "\n".join([f"{indent}- {title}:", *(f"{indent}      - {name}" for name in names)])


def for_site(markdown: str, page: str) -> str:
    """Return a page with links that a site can follow. Code in fences stays as it is."""
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _with_links(part, page) for part in parts)


def _with_links(text: str, page: str) -> str:
    def link(found: re.Match[str]) -> str:
        is_image, title, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found.group(0)
        path = in_repository(page, target)
        here = page_at(path)
        if here is not None:
            return f"{is_image}[{title}]({relpath(here, str(PurePosixPath(page).parent))}{anchor or ''})"
        if not (ROOT / path).exists():
            return found.group(0)  # the build says so, and fails
        return title if path in title.strip("`") else f"{title} (`{path}`)"

    # Python-Markdown begins a list only after an empty line, others at once.
    return LINK.sub(link, LIST_IN_PARAGRAPH.sub(r"\1\n\n", text))


def in_repository(page: str, target: str) -> str:
    """Return the path, from the repository's top, of a page's link."""
    folder = "" if page == README else str(PurePosixPath("docs", page).parent)
    return normpath(str(PurePosixPath(folder, target)))


def page_at(path: str) -> str | None:
    """Return the site's name of a file of the repository; None where it has none."""
    if path == "README.md":
        return README
    name = path.removeprefix("docs/")
    if name == path:
        return None
    return next((one for one in (name, f"{name}/README.md") if (DOCS / one).is_file()), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to write into")
    write_site(parser.parse_args().folder.resolve())

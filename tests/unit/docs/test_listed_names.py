"""What clients and operators meet by name is in a page: codes of errors, and metrics."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
_CODE = re.compile(r'\bcode="([a-z_]+)"|HttpError\(\d+, "[a-z_]+", "([a-z_]+)"\)')
_METRIC = re.compile(r'"(alignedserve_[a-z_]+|vllm:[a-z_]+)"')
_NEVER_SENT = {"client_gone", "not_allowed"}  # whose client is not there; in whose place every error has its own


def test_codes_of_errors_are_in_a_page() -> None:
    folders = ("api", "batches", "gateway", "pictures", "runtime/grammar")
    codes = {code for text in _sources(*folders) for found in _CODE.findall(text) for code in found if code}
    assert sorted(code for code in codes - _NEVER_SENT if f"`{code}`" not in TEXT) == []


def test_metrics_are_in_a_page() -> None:
    names = {name for text in _sources("api/metrics", "gateway") for name in _METRIC.findall(text)}
    assert sorted(name for name in names if not _is_shown(name)) == []


def _is_shown(name: str) -> bool:
    """Return whether it is there in full; of vLLM's names in a list without their prefix, too."""
    return re.search(rf"[`:]{re.escape(name.removeprefix('vllm:'))}(?:_total)?[`{{]", TEXT) is not None


def _sources(*folders: str) -> Iterator[str]:
    for folder in folders:
        yield from (path.read_text(encoding="utf-8") for path in (ROOT / "alignedserve" / folder).rglob("*.py"))

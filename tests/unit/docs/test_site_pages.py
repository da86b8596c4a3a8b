"""Pages of the site: links that it can follow."""

from scripts.site import pages


def test_links_lead_to_pages_and_sources_become_their_paths() -> None:
    assert pages.for_site("[a](../README.md#x) [b](batches.md)", "api.md") == "[a](overview.md#x) [b](batches.md)"
    assert pages.for_site("[b](docs/batches.md)", "overview.md") == "[b](batches.md)"
    assert pages.for_site("[the file](../setup.py)", "api.md") == "the file (`setup.py`)"
    assert pages.for_site("[c](nowhere.md)", "api.md") == "[c](nowhere.md)", "the build fails for it"
    assert pages.for_site("```\n[b](../setup.py)\n```", "api.md") == "```\n[b](../setup.py)\n```"


def test_folders_that_grow_are_listed() -> None:
    listed = pages.settings("nav:\n    - Decisions: []\n")
    assert "\n          - decisions/0001-floors-and-rooms.md" in listed

"""Marks these tests slow: what they test, benchmarks and experiments, serves no request."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out where slow tests are deselected: its imports take seconds in every process."""
    is_deselected = "not slow" in config.option.markexpr and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return True if is_deselected and collection_path.is_relative_to(Path(__file__).parent) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder slow."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)

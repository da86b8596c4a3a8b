"""Plugins: parts of AlignedServe that some deployments need, found by their entry points.

A plugin is a folder in `plugins/` and a row of `[project.entry-points."alignedserve.plugins"]`. The core names a plugin
by its text and never imports it. Each room that uses a plugin declares the protocol of what it calls.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from alignedserve.core.errors import ConfigError


@cache
def load_plugin(name: str) -> Any:
    """Return what the entry point of a plugin names. Raises ConfigError, saying what to install."""
    for point in entry_points(group="alignedserve.plugins", name=name):
        try:
            return point.load()
        except ImportError as error:
            raise ConfigError(f"{name} needs {error.name}: pip install 'alignedserve[{name}]'") from error
    raise ConfigError(f"{name} is not installed: pip install 'alignedserve[{name}]'")

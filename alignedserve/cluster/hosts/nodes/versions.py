"""Versions in which the processes of a cluster must agree. Commands use it: it is loaded in a moment."""

import platform
from importlib.metadata import version

from alignedserve.messages.wire import PROTOCOL_VERSION


def own_versions() -> str:
    """Return the versions in which all nodes of a cluster must agree."""
    return f"AlignedServe {version('alignedserve')} (protocol {PROTOCOL_VERSION}), Python {platform.python_version()}"

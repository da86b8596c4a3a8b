"""Loads the native kernels, where they were built."""

import importlib
from typing import Any


def load_native(name: str) -> Any:
    """Return the extension module if it is built and has `name`, which older builds may lack; else None."""
    try:
        native = importlib.import_module("kernels._native")
    except ImportError:
        return None
    return native if hasattr(native, name) else None

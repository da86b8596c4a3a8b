"""The native kernels, where they were built."""

import importlib
from typing import Any


def load_native(name: str) -> Any:
    """The extension module, if it is built and has `name`: one built from older sources may lack what is newer. Else
    None."""
    try:
        native = importlib.import_module("kernels._native")
    except ImportError:
        return None
    return native if hasattr(native, name) else None

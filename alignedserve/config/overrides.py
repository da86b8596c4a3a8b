"""Overrides as this program writes them, for itself or for a process that it starts."""

import json
from typing import Any


def override_of(field: str, value: Any) -> str:
    """Return the override that sets a field to a plain value: as JSON, so that no path is read as a YAML number."""
    return f"{field}={json.dumps(value, ensure_ascii=False)}"  # a surrogate that is escaped would be no YAML

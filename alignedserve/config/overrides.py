"""Overrides written by this program for a process of its own."""

import json
import math
from typing import Any

import yaml


def override_of(field: str, value: Any) -> str:
    """Return the override that sets a field to a plain value: as JSON, so that no path is read as a YAML number."""
    return f"{field}={json.dumps(value, ensure_ascii=False)}"  # a surrogate that is escaped would be no YAML


def written_override(name: str, value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    value_text = text.removesuffix("...\n").rstrip("\n")  # three dots end a document of one word
    return f"{name}={value_text}"

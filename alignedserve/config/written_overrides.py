"""Writes `section.field=value` so that it is read as the value that it was: JSON will not do, as YAML reads its 1e-05
and Infinity as texts, and its escaped pairs as two characters."""

import math
from typing import Any

import yaml


def written_override(name: str, value: Any) -> str:
    """Return the override that sets a field to a plain value."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    value_text = text.removesuffix("...\n").rstrip("\n")  # three dots end a document of one word
    return f"{name}={value_text}"

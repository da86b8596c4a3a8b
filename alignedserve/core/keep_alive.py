"""How long a model stays in memory after its last request, as Ollama's `keep_alive` says it."""

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,9}(\.\d{1,6})?", re.ASCII)
MAX_KEEP_ALIVE_S = 365 * 86_400.0


def parse_keep_alive(value: str | float) -> float:
    """Return seconds: a number of them, or a text such as `90`, `5m` or `1h30m`. Below zero: for ever, `inf`.

    Raises ValueError saying what is allowed.
    """
    seconds = _seconds(value) if isinstance(value, str) else float(value)
    if isinstance(value, bool) or seconds is None or math.isnan(seconds):
        raise ValueError(_ALLOWED)
    if seconds < 0.0:
        return math.inf
    if seconds > MAX_KEEP_ALIVE_S:
        raise ValueError(f"must be at most {MAX_KEEP_ALIVE_S:.0f} seconds, or below 0 for ever")
    return seconds


def _seconds(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    sign, parts = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    matches = list(_PART.finditer(parts))
    if not matches or "".join(match[0] for match in matches) != parts:
        return None
    return sign * sum(float(match[1]) * _UNITS[match[2]] for match in matches)


_ALLOWED = "must be seconds, or a time such as 90s, 5m or 1h30m; below 0: for ever"

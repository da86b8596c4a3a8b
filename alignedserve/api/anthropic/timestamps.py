"""Times as Anthropic's API writes them."""

from datetime import UTC, datetime


def timestamp(unix_s: float) -> str:
    """Return a Unix time in RFC 3339."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")

"""What is left of a key's limits, in the headers of a response that OpenAI's clients know."""

import math

_NAMES = ("limit", "remaining", "reset")
LIMIT_HEADERS = tuple(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in _NAMES)
_ROUNDING = 1e-6


class ShownLimits:
    """Collects what the headers of one response say."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, float, float]] = {}

    def show(self, what: str, limit: int, owed: float, may_owe: float) -> None:
        """Show a limit of which this part is owed, and that part may be."""
        self._shown[what] = (limit, owed, may_owe)

    def as_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as ASGI has them."""
        headers = []
        for what, (limit, owed, may_owe) in self._shown.items():
            remaining = max(0, math.floor((may_owe - owed) * limit + _ROUNDING))
            reset_s = owed / may_owe * 60.0 if may_owe > 0.0 else 60.0
            values = (str(limit), str(min(limit, remaining)), duration(reset_s))
            named = zip(_NAMES, values, strict=True)
            headers += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in named]
        return headers


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000.0)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"

"""Bounds what a body costs to parse, before it is parsed: no parser lets go of the interpreter in between."""

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

_CHEAP_BYTES = 32_768  # parsed in less than 2 ms, whatever they are


def check_cost(raw: bytes, config: GatewayConfig) -> None:
    """Raise InvalidRequest for JSON of too many values, or too many objects and lists. It need not be valid."""
    if len(raw) <= _CHEAP_BYTES:
        return
    num_containers = num_values = position = 0
    while position < len(raw):
        quote = raw.find(b'"', position)
        end = quote if quote >= 0 else len(raw)
        num_containers += raw.count(b"{", position, end) + raw.count(b"[", position, end)
        num_values += raw.count(b",", position, end)
        if num_containers > config.max_json_containers:
            message = f"The body has more than {config.max_json_containers} objects and lists."
            raise InvalidRequest(message, code="invalid_json")
        if num_values > config.max_json_values:
            raise InvalidRequest(f"The body has more than {config.max_json_values} values.", code="invalid_json")
        position = _end_of_string(raw, end + 1)


def _end_of_string(raw: bytes, start: int) -> int:
    """Return the place behind the quote that ends the string which begins here."""
    while (close := raw.find(b'"', start)) >= 0:
        before = raw[start:close]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return close + 1
        start = close + 1
    return len(raw)

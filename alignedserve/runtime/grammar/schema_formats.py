"""The values of `format` that answers are held to.

Our own patterns stand where llguidance's let texts through that are no such thing: 29 February of any year, labels of
more than 63 characters, the year 0. Texts that they leave out (leap seconds, quoted local parts) are valid, but rare.
"""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_MONTH_DAY = f"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}"  # at most 61 characters
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = rf"{_ATOM}{{1,32}}(?:\.{_ATOM}{{1,14}}){{0,2}}"

# None: llguidance's own. The others are anchored here.
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": None,
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": None,
    "time": _TIME,
    "uri": None,
    "uuid": None,
}


def pattern_of(name: str) -> str | None:
    """Return the anchored pattern of a format; None where llguidance's own is right."""
    pattern = FORMATS[name]
    return None if pattern is None else f"^(?:{pattern})$"

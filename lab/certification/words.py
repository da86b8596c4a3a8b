"""Figures in words."""

import math

from alignedserve.core.metrics import in_percent
from lab.certification.verdict import Check
from lab.sim.report.svg import shown

_DIGITS, _MOST_DIGITS = 2, 9
_WHOLE = "100 %"


def seconds(value: float | None) -> str:
    """Return a time, in milliseconds below a second; a dash where there is none."""
    if value is None:
        return "-"
    return f"{shown(value)} s" if value >= 1 else f"{shown(value * 1000)} ms"


def duration(value: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size or (value >= size and value % size == 0):
            return f"{round(value / size, 1):g} {unit}"
    return f"{shown(value)} s"


def percent(share: float | None) -> str:
    return "-" if share is None else in_percent(share)


def measured_of(check: Check) -> str:
    """Format with enough digits that rounding never makes a missed bound look met."""
    if check.measured is None:
        return "not measured"
    if math.isinf(check.measured):
        return "none came"
    bound = _with_unit(check.bound, check.unit)
    for digits in range(_DIGITS, _MOST_DIGITS):
        words = _with_unit(check.measured, check.unit, digits)
        if (check.holds or words != bound) and (words != _WHOLE or check.measured >= 100.0):
            return words
    return _with_unit(check.measured, check.unit)


def bound_of(check: Check) -> str:
    return f"at {'least' if check.is_least else 'most'} {_with_unit(check.bound, check.unit)}"


def _with_unit(value: float, unit: str, digits: int = _DIGITS) -> str:
    number = f"{value:,.{digits}f}".rstrip("0").rstrip(".") if unit else f"{value:,.0f}"
    return f"{'0' if number == '-0' else number} {unit}".strip()

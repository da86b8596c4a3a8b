"""Figures in words."""

import math

from alignedserve.certification.verdict import Check
from alignedserve.sim.report.svg import shown


def seconds(value: float | None) -> str:
    """Return a time, in milliseconds below a second; a dash where there is none."""
    if value is None:
        return "-"
    return f"{shown(value)} s" if value >= 1 else f"{shown(value * 1000)} ms"


def duration(value: float) -> str:
    """Return a span of time: 90 s, 12 min, 2 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size or (value >= size and value % size == 0):
            return f"{round(value / size, 1):g} {unit}"
    return f"{shown(value)} s"


def percent(share: float | None) -> str:
    """Return a share in percent; a dash where there is none."""
    return "-" if share is None else f"{share:.1%}"


def measured_of(check: Check) -> str:
    """Return what was measured."""
    if check.measured is None:
        return "not measured"
    return "none came" if math.isinf(check.measured) else _with_unit(check.measured, check.unit)


def bound_of(check: Check) -> str:
    """Return the bound."""
    return f"at {'least' if check.is_least else 'most'} {_with_unit(check.bound, check.unit)}"


def _with_unit(value: float, unit: str) -> str:
    number = f"{value:,.2f}".rstrip("0").rstrip(".") if unit else f"{value:,.0f}"
    return f"{'0' if number == '-0' else number} {unit}".strip()

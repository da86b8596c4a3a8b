"""Says what a model's chat template makes of `reasoning_effort`."""

from collections.abc import Collection

_SWITCHES = ("enable_thinking", "thinking")  # of templates that only know on and off
_LEVELS = "reasoning_effort"  # of templates that know levels


def effort_variables(effort: str, known: Collection[str]) -> dict[str, str | bool] | None:
    """Return the template's variables for this effort, of the names that it reads; None: it has none for it."""
    found: dict[str, str | bool] = {}
    if _LEVELS in known:
        found[_LEVELS] = effort
    found |= {name: effort != "none" for name in _SWITCHES if name in known}
    return found or ({} if effort == "none" else None)

"""Checks of a GPU by a small model, and of single kinds of layers before a model that has them is served from it.

Each is the self-check (`alignedserve.runtime.device_check.self_check`) in a process of its own, which may crash or hang
without harm. What passed is remembered; what failed is tried again the next time.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.verdicts import FAILURE, OK, ask, identity_of, keep, read_kept, verdict_path

_COMMAND = (sys.executable, "-m", "alignedserve.runtime.device_check.self_check")
_LIMIT_S = 180.0  # with kernels that are compiled for the first time
_LONGEST_REASON = 300


def require_kinds(device: str, kinds: Mapping[str, str], folder: Path, command: Sequence[str] = _COMMAND) -> None:
    """Check each kind of layers on this GPU, unless it has passed before. Raises ConfigError naming one that fails.

    `kinds`: by name, what to set where one is not computed. `folder`: keeps passed checks.
    """
    for kind, instead in kinds.items():
        reason = obstacle_on(device, folder, command, kind=kind)
        if reason is not None:
            raise ConfigError(f"{device} does not compute {kind} as a CPU does: {reason}. Set {instead}")


def obstacle_on(
    device: str,
    folder: Path,
    command: Sequence[str] = _COMMAND,
    limit_s: float = _LIMIT_S,
    *,
    kind: str | None = None,
) -> str | None:
    """Return why the self-check has not passed on this GPU, in one line; None: it has, now or before.

    `folder`: keeps passed checks. `kind`: of layers that is checked; None: a Llama is.
    """
    key, place, options = identity_of(device), "gpu-checks", [device]
    if kind is not None:
        key, place, options = [*key, kind], "kind-checks", [device, "--kind", kind]
    path = verdict_path(folder, place, key)
    if read_kept(path) == key:
        return None
    reason = _ask([*command, *options], limit_s, "self-check" if kind is None else "check")
    if reason is None:
        keep(path, key)
    return reason


def _ask(command: Sequence[str], limit_s: float, name: str) -> str | None:
    said = ask(command, limit_s)
    if isinstance(said, str):
        return f"its {name} {said}"
    if said.get(OK) is True:
        return None
    return str(said.get(FAILURE) or f"its {name} said nothing that can be read")[:_LONGEST_REASON]

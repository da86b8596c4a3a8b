"""Trials of single kinds of layers on a GPU, before a model that has them is served from it.

Each is the self-check of a small model with such layers (`alignedserve.runtime.device_check.self_check`), in a process
of its own, which may crash or hang without harm. What passed is remembered as the self-check of a GPU is.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.verdicts import FAILURE, OK, ask, identity_of, keep, read_kept, verdict_path

_COMMAND = (sys.executable, "-m", "alignedserve.runtime.device_check.self_check")
_LIMIT_S = 180.0  # with kernels that are compiled for the first time
_LONGEST_REASON = 300


def require_kinds(device: str, kinds: Sequence[str], folder: Path, command: Sequence[str] = _COMMAND) -> None:
    """Check each kind of layers on this GPU, unless it has passed before. Raises ConfigError naming one that fails.

    `folder`: keeps what passed; what fails is tried again the next time.
    """
    for kind in kinds:
        key = [*identity_of(device), kind]
        path = verdict_path(folder, "kind-checks", key)
        if read_kept(path) == key:
            continue
        said = ask([*command, device, "--kind", kind], _LIMIT_S)
        if isinstance(said, str):
            reason = f"its check {said}"
        elif said.get(OK) is True:
            keep(path, key)
            continue
        else:
            reason = str(said.get(FAILURE) or "its check said nothing that can be read")[:_LONGEST_REASON]
        raise ConfigError(f"{device} does not compute {kind} as a CPU does: {reason}. Set engine.device=cpu")

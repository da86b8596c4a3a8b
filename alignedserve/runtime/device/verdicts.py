"""What other processes find out about a GPU, which may crash or hang without harm, and its memory on disk.

A verdict holds for the GPU, driver, PyTorch, Triton, libraries and code of ours that it was found with.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.devices import driver_version, torch_cuda, version_of

OK, FAILURE = "ok", "failure"  # fields of what a self-check prints
_LONGEST_REASON = 300
_MAX_KEPT_BYTES = 8192
# Of our code, what computes on a GPU.
_KERNELS = ("kernels", "kernels/gpu", "kernels/gpu/attention", "kernels/states")
_ROOMS = ("attention", "device", "device_check", "engine", "kv")  # of the runtime

_suspects: dict[Path, Any] = {}  # files, and what is kept there if the device fails


def cache_folder() -> Path:
    return Path.home() / ".cache" / "alignedserve"


def verdict_path(folder: Path, kind: str, key: Sequence[str]) -> Path:
    """Return the file of a verdict that holds for `key`."""
    return folder / kind / f"{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:32]}.json"


def ask(command: Sequence[str], limit_s: float) -> dict[str, Any] | str:
    """Return the JSON object in the last line that a process prints; or why there is none, as a predicate."""
    try:
        ended = subprocess.run(  # noqa: S603  (this Python, our own module)
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    if ended.returncode != 0:
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()] or ["nothing was said"]
        return f"ended with {ended.returncode}: {lines[-1][:_LONGEST_REASON]}"
    with contextlib.suppress(ValueError, LookupError, RecursionError):
        answer = json.loads(ended.stdout.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return "said nothing that can be read"


def read_kept(path: Path) -> Any:
    """Return what was kept in this file; None: nothing that can be read."""
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MAX_KEPT_BYTES))
    except (OSError, ValueError, RecursionError):  # none, half of one, or another's
        return None


def keep(path: Path, verdict: Any) -> None:
    """Keep a verdict, as far as the folder can be written: without it, it is only asked for again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(verdict, file)
        Path(name).replace(path)


def suspect(path: Path, verdict: Any) -> None:
    _suspects[path] = verdict


def accuse_suspects() -> None:
    for path, verdict in _suspects.items():
        keep(path, verdict)


def identity_of(device: str) -> list[str]:
    """Return what a verdict is about: the GPU, its driver, PyTorch, Triton and our code."""
    import torch

    gpu: Any = torch_cuda().get_device_properties(device)
    return [
        f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.total_memory}",
        str(getattr(gpu, "uuid", device)),
        driver_version() or "unknown driver",
        f"torch {torch.__version__} cuda {torch.version.cuda}",
        f"triton {version_of('triton') or 'none'} flash-attn-4 {version_of('flash-attn-4') or 'none'}",
        f"alignedserve {version_of('alignedserve') or 'none'} {code_digest()}",
    ]


def code_digest() -> str:
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def code_files() -> list[Path]:
    files: list[Path] = []
    for name in _KERNELS:
        files += sorted((Path(kernels.__path__[0]).parent / name).glob("*.py"))
    for name in _ROOMS:
        files += sorted((Path(__file__).parent.parent / name).rglob("*.py"))
    return files


_COMMAND = (sys.executable, "-m", "alignedserve.runtime.device_check.self_check")
_LIMIT_S = 180.0  # with kernels that are compiled for the first time


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
    """Return why the self-check (device_check.self_check) has not passed on this GPU, in one line; None: it has.

    `folder`: keeps passed checks; failed ones are tried again. `kind`: of layers that is checked; None: a Llama is.
    """
    key, subfolder, options = identity_of(device), "gpu-checks", [device]
    if kind is not None:
        key, subfolder, options = [*key, kind], "kind-checks", [device, "--kind", kind]
    path = verdict_path(folder, subfolder, key)
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

"""The meaning of engine.device=auto: the GPUs of this machine once they have passed the self-check, else the CPU."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import kernels
from alignedserve.config.sections import ClusterConfig
from alignedserve.runtime.device.devices import AUTO, CPU, CUDA, cuda_obstacle, describe_gpus, gpu_names, torch_cuda
from alignedserve.runtime.device_check.verdict import FAILURE, OK

_LIMIT_S = 180.0  # with kernels that are compiled for the first time
_COMMAND = (sys.executable, "-m", "alignedserve.runtime.device_check.self_check")
_LONGEST_REASON = 300
_MAX_KEPT_BYTES = 4096
# Of our code, what computes on a GPU.
_KERNELS = ("kernels", "kernels/gpu", "kernels/narrow")
_ROOMS = ("attention", "device", "device_check", "engine", "kv")  # of the runtime
logger = logging.getLogger(__name__)

Check = Callable[[str], str | None]  # of a GPU by its name: why it cannot be trusted, if so


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device that is used, and what the user should be told of it."""

    device: str  # as engine.device, but never auto
    remark: str = ""
    is_warning: bool = False  # there is a GPU, and it is not used

    def log(self) -> None:
        """Write the remark, if there is one, to the log."""
        if self.remark:
            logger.log(logging.WARNING if self.is_warning else logging.INFO, self.remark)


def with_device(config: ClusterConfig, choice: DeviceChoice) -> ClusterConfig:
    """Return the configuration with the device that was chosen."""
    replace = msgspec.structs.replace
    return replace(config, engine=replace(config.engine, device=choice.device))


def choose_device(name: str, check: Check | None = None) -> DeviceChoice:
    """Return what `name`, as engine.device, means here; only auto asks anything. `check`: replaces the self-check.

    The first check of a GPU takes as long as compiling kernels does, later ones are remembered.
    """
    if name != AUTO:
        return DeviceChoice(name)
    if cuda_obstacle() is not None:
        return DeviceChoice(CPU)
    check = check or partial(obstacle_on, folder=cache_folder())
    for gpu in gpu_names(CUDA):
        obstacle = check(gpu)
        if obstacle is not None:
            return DeviceChoice(
                CPU,
                f"{gpu} IS NOT USED, workers compute on the CPU: {obstacle}. engine.device=cuda takes the GPU "
                "nevertheless, engine.device=cpu asks nothing",
                is_warning=True,
            )
    return DeviceChoice(CUDA, f"engine.device=auto takes {'; '.join(describe_gpus())}: the self-check has passed")


def cache_folder() -> Path:
    """Return the user's folder for what can be found out again."""
    return Path.home() / ".cache" / "alignedserve"


def obstacle_on(device: str, folder: Path, command: Sequence[str] = _COMMAND, limit_s: float = _LIMIT_S) -> str | None:
    """Return why the self-check has not passed on this GPU, in one line; None: it has, now or before.

    `folder`: keeps passed checks. A check that fails is repeated the next time.
    """
    key = identity_of(device)
    path = folder / "gpu-checks" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    if _read(path) == key:
        return None
    reason = _ask([*command, device], limit_s)
    if reason is None:
        _keep(path, key)
    return reason


def identity_of(device: str) -> list[str]:
    """Return what a verdict is about: the GPU, its driver, PyTorch, Triton and our code."""
    import torch

    gpu: Any = torch_cuda().get_device_properties(device)
    return [
        f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.total_memory}",
        str(getattr(gpu, "uuid", device)),
        driver_version() or "unknown driver",
        f"torch {torch.__version__} cuda {torch.version.cuda}",
        f"triton {_version_of('triton')} flash-attn-4 {_version_of('flash-attn-4')}",
        f"alignedserve {_version_of('alignedserve')} {code_digest()}",
    ]


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, as its module in the kernel tells; None: it does not."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


def code_digest() -> str:
    """Return a digest of the code that computes on a GPU."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def code_files() -> list[Path]:
    """Return the files of the code that computes on a GPU, in one order."""
    files: list[Path] = []
    for name in _KERNELS:
        files += sorted((Path(kernels.__path__[0]).parent / name).glob("*.py"))
    for name in _ROOMS:
        files += sorted((Path(__file__).parent.parent / name).rglob("*.py"))
    return files


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _ask(command: Sequence[str], limit_s: float) -> str | None:
    try:
        ended = subprocess.run(  # noqa: S603  (this Python, our own module)
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its self-check did not end within {limit_s:.0f} s"
    if ended.returncode != 0:
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()] or ["nothing was said"]
        return f"its self-check ended with {ended.returncode}: {lines[-1][:_LONGEST_REASON]}"
    try:
        verdict = json.loads(ended.stdout.strip().splitlines()[-1])
        return None if verdict[OK] is True else str(verdict[FAILURE])[:_LONGEST_REASON]
    except (ValueError, LookupError, TypeError):
        return "its self-check said nothing that can be read"


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MAX_KEPT_BYTES))
    except (OSError, ValueError, RecursionError):  # none, half of one, or another's
        return None


def _keep(path: Path, key: list[str]) -> None:
    """Keep a passed check, as far as the folder can be written: without it, it is only asked again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(key, file)
        Path(name).replace(path)

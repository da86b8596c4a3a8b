"""The devices of this machine: the choice for each worker, and reasons why no GPU is available.

What other processes find out about a GPU, which may crash or hang without harm, and its memory on disk.

A verdict holds for the GPU, driver, PyTorch, Triton, libraries and code of ours that it was found with."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.cores import num_cores

_DRIVER = Path("/sys/module/nvidia/version")
# The oldest drivers for a version of CUDA, by NVIDIA's table of minor version compatibility.
_OLDEST_DRIVERS = {13: 580, 12: 525}
_CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"  # PyTorch's builds for CUDA 12.6


def driver_version(file: Path = _DRIVER) -> str | None:
    """Return the version of NVIDIA's driver, as its module in the kernel tells; None: it does not."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip() or None
    return None


def fitting_torch(driver: str | None, built_for: str | None, torch_version: str) -> str | None:
    """Return which build of PyTorch fits this driver, where the one that is installed needs a newer; else None.

    `built_for`: the version of CUDA that PyTorch is built for."""
    number = (driver or "").partition(".")[0]
    needed = _OLDEST_DRIVERS.get(int((built_for or "0").partition(".")[0]))
    if not number.isdigit() or needed is None or int(number) >= needed:
        return None
    remark = f"driver {driver} is older than {needed}, which CUDA {built_for} needs: update it"
    if int(number) < _OLDEST_DRIVERS[12]:
        return remark
    version = torch_version.partition("+")[0]
    return f"{remark}, or pip install torch=={version} --index-url {_CUDA_12_INDEX}"


AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_MAX_GPUS = 64  # of one machine


def torch_cuda() -> Any:
    """Return torch.cuda, importing PyTorch: drivers of clusters without a GPU do without it."""
    import torch

    return torch.cuda


def _version_of_cuda() -> str | None:
    if "torch" in sys.modules:
        version: str | None = sys.modules["torch"].version.cuda
        return version
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "PyTorch is installed"
    assert spec.origin is not None, "a package with files"
    built: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return built


def device_type(device: str) -> str:
    return device.partition(":")[0]


def cuda_obstacle() -> str | None:
    """Return why no GPU can be used, in one line; None: one can. Takes no memory on it."""
    if _version_of_cuda() is None:
        return "this PyTorch is built for CPUs alone; docs/gpu.md says how to install one with CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_gpu = torch_cuda().is_available() and torch_cuda().device_count() > 0
    if has_gpu:
        return None
    # PyTorch only warns of a driver that is too old or does not respond.
    messages = [str(warning.message).strip().partition("\n")[0] for warning in caught]
    said = messages[0][:300] if messages else "no NVIDIA GPU is visible here; does nvidia-smi show one?"
    advice = fitting_torch(driver_version(), _version_of_cuda(), sys.modules["torch"].__version__)
    return said if advice is None else f"{advice} ({said})"


def worker_devices(name: str, num_workers: int) -> list[str]:
    """Return the device of each worker, by engine.device. Raises ConfigError saying why it is unavailable. `auto` is
    the CPU here: `device_check` replaces it before."""
    if not name.startswith(CUDA):
        return [CPU] * num_workers
    obstacle = cuda_obstacle()
    if obstacle is not None:
        raise ConfigError(f"engine.device is {name}, but {obstacle}")
    count = torch_cuda().device_count()
    _, _, number = name.partition(":")
    if number and int(number) >= count:
        raise ConfigError(f"engine.device is {name}, but the last GPU here is cuda:{count - 1}")
    return [name if number else f"{CUDA}:{index % count}" for index in range(num_workers)]


def rank_devices(first: str, size: int) -> tuple[str, ...]:
    """Return the device of each of a worker's ranks: that of the first, and the GPUs behind it."""
    if not first.startswith(CUDA):
        return (first,) * size
    _, _, number = first.partition(":")
    return tuple(f"{CUDA}:{int(number or 0) + rank}" for rank in range(size))


def check_ranks(name: str, size: int, num_stages: int = 1, num_shares: int = 1) -> None:
    """Check that a worker finds devices for all its ranks, by engine.device, or cores on this machine for its stages or
    the processes that share its experts. Raises ConfigError."""
    if num_shares > num_cores():
        raise ConfigError(
            f"engine.expert_parallel is {num_shares}, but this machine has {num_cores()} cores; set it lower"
        )
    if num_stages > num_cores():
        raise ConfigError(
            f"engine.pipeline_parallel is {num_stages}, but this machine has {num_cores()} cores; set it lower, or "
            "serve on as many hosts"
        )
    if size == 1:
        return
    if not name.startswith(CUDA):
        cores = num_cores()
        if size > cores:
            raise ConfigError(f"engine.tensor_parallel is {size}, but this machine has {cores} cores; set it lower")
        return
    (first,) = worker_devices(name, 1)
    devices, count = rank_devices(first, size), torch_cuda().device_count()
    if int(devices[-1].partition(":")[2]) >= count:
        raise ConfigError(
            f"engine.tensor_parallel is {size} from {devices[0]} on, but there are {count} GPUs here, and NCCL takes "
            "no two ranks on one GPU; set it lower"
        )
    firsts = [devices[0]] if ":" in name else [f"{CUDA}:{index}" for index in range(0, count - size + 1, size)]
    for device in firsts:
        check_alike(rank_devices(device, size))


def check_alike(devices: Sequence[str]) -> None:
    """Check that a worker's ranks would be on GPUs of one kind: all wait for the slowest. Raises ConfigError."""
    kinds = dict.fromkeys(torch_cuda().get_device_properties(device).name for device in devices)
    if len(kinds) > 1:
        raise ConfigError(
            f"engine.tensor_parallel: the ranks' GPUs ({', '.join(devices)}) are of different kinds: "
            f"{', '.join(kinds)}; leave out the odd ones by CUDA_VISIBLE_DEVICES"
        )


def gpu_names(name: str) -> tuple[str, ...]:
    """Return the GPUs that workers may use, by engine.device; none: they compute on the CPU. Raises ConfigError."""
    devices = dict.fromkeys(worker_devices(name, _MAX_GPUS))
    return tuple(device for device in devices if device != CPU)


def describe_gpus() -> list[str]:
    """Describe each usable GPU in one line."""
    if cuda_obstacle() is not None:
        return []
    lines = []
    for index in range(torch_cuda().device_count()):
        properties = torch_cuda().get_device_properties(index)
        memory = f"{properties.total_memory / 1024**3:.0f} GiB"
        lines.append(
            f"cuda:{index} {properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
        )
    return lines


_LIBRARIES = ("triton", "flash-attn-4", "flash-attn", "transformers", "alignedserve")


def remarks(gpus: Sequence[Any]) -> list[str]:
    notes = []
    slices = [index for index, gpu in enumerate(gpus) if "MIG" in str(gpu.name).split()]
    if slices:
        notes.append(
            f"{', '.join(f'cuda:{index}' for index in slices)}: a slice of a GPU (MIG), of which a process sees one "
            "and which no other maps: one worker, nothing over cuda_ipc"
        )
    kinds = dict.fromkeys(str(gpu.name) for gpu in gpus)
    if len(kinds) > 1:
        notes.append(
            f"GPUs of {len(kinds)} kinds ({', '.join(kinds)}): default sizes follow from the smallest memory and the "
            "slowest, CUDA_VISIBLE_DEVICES leaves some out"
        )
    return notes


def machine_remarks() -> list[str]:
    """Return the remarks on the GPUs that are visible here; none without."""
    if cuda_obstacle() is not None:
        return []
    return remarks(visible_gpus())


def visible_gpus() -> list[Any]:
    """Return PyTorch's descriptions of the visible GPUs, which PyTorch must be able to use."""
    cuda = torch_cuda()
    return [cuda.get_device_properties(index) for index in range(cuda.device_count())]


def described(gpus: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what matters of GPUs. Plain JSON."""
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
        }
        for gpu in gpus
    ]


def machine_gpus() -> dict[str, Any]:
    """Return GPUs, driver and versions of what computes on them. Plain JSON."""
    import torch

    gpus = visible_gpus() if cuda_obstacle() is None else []
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "libraries": {name: version_of(name) for name in _LIBRARIES},
        "gpus": described(gpus),
        "remarks": remarks(gpus),
    }


def version_of(distribution: str) -> str | None:
    """Return the version of a package that is installed; None: it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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

    `kinds`: by name, what to set where one is not computed. `folder`: keeps passed checks."""
    for kind, instead in kinds.items():
        reason = obstacle_on(device, folder, command, kind=kind)
        if reason is not None:
            raise ConfigError(f"{device} does not compute {kind} as a CPU does: {reason}. Set {instead}")


def obstacle_on(
    device: str, folder: Path, command: Sequence[str] = _COMMAND, limit_s: float = _LIMIT_S, *, kind: str | None = None
) -> str | None:
    """Return why the self-check (device_check.self_check) has not passed on this GPU, in one line; None: it has.

    `folder`: keeps passed checks; failed ones are tried again. `kind`: of layers that is checked; None: a Llama is."""
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

"""Speed of block transfers by every way of this machine, against moving the same bytes without looking at them.

In shared memory (`memory_copies`), between a device and page-locked memory (`device_transfers`), between processes
(`peer_transfers`). What moves between processes needs msgspec, as a server does.
"""

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType

import torch

from alignedserve.core.errors import AlignedServeError
from alignedserve.runtime.device.devices import CPU, CUDA, cuda_obstacle
from benchmarks.measuring.results import TransferReport, TransferResult
from benchmarks.transfer.device_transfers import pinned_rows, registered_rows
from benchmarks.transfer.spec import TransferBenchmarkSpec

Seen = Callable[[TransferReport], None]
_MESSAGES = "msgspec"


def measure_host_transfers(
    spec: TransferBenchmarkSpec, report: TransferReport, on_measured: Seen = lambda _: None
) -> None:
    """Add to the report what goes between processes on the host; `on_measured` sees it after each."""
    _between_processes("shm", report, on_measured, lambda: _module("memory_copies").memory_rows(spec))
    _between_processes("gloo", report, on_measured, lambda: _peer_rows(spec, "gloo", CPU, CPU))


def measure_device_transfers(
    spec: TransferBenchmarkSpec, device: torch.device, report: TransferReport, on_measured: Seen = lambda _: None
) -> None:
    """Add to the report what moves blocks of a GPU; on a CPU, that there is none."""
    if device.type != CUDA:
        reason = cuda_obstacle() or "another device was asked for"
        report.left_out.append(f"pinned copies, registered arenas and cuda_ipc move blocks of a GPU: {reason}")
        return
    _add(pinned_rows(spec, device), report, on_measured)
    _between_processes("registered arenas", report, on_measured, lambda: registered_rows(spec, device))
    _between_processes("cuda_ipc", report, on_measured, lambda: _peer_rows(spec, "cuda_ipc", "cuda:0", "cuda:0"))
    if torch.cuda.device_count() < 2:
        report.left_out.append("cuda_ipc between two GPUs: there is one GPU")
        return
    ends = ("cuda:0", "cuda:1")
    _between_processes("cuda_ipc between two GPUs", report, on_measured, lambda: _peer_rows(spec, "cuda_ipc", *ends))


def _peer_rows(spec: TransferBenchmarkSpec, transport: str, here: str, there: str) -> Iterable[TransferResult]:
    peers = _module("peer_transfers")
    rows: Iterable[TransferResult] = peers.peer_rows(spec, peers.PeerWay(transport, here, there))
    return rows


def _between_processes(
    what: str, report: TransferReport, on_measured: Seen, rows: Callable[[], Iterable[TransferResult]]
) -> None:
    try:
        _add(rows(), report, on_measured)
    except ModuleNotFoundError as error:
        if error.name != _MESSAGES:
            raise
        report.left_out.append(f"{what}: moving blocks between processes needs {_MESSAGES} (pip install {_MESSAGES})")
    except (AlignedServeError, RuntimeError, OSError) as error:
        first_line = str(error).partition("\n")[0][:300]
        report.failures.append(f"{what}: {type(error).__name__}: {first_line}")


def _add(rows: Iterable[TransferResult], report: TransferReport, on_measured: Seen) -> None:
    for row in rows:
        report.rows.append(row)
        on_measured(report)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.transfer.{name}")

"""GPUs of one host: claimed by one cluster at a time, counted by what is free, enough for an 8B model by default."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from alignedserve.cli.commands import doctor
from alignedserve.cluster import preflight
from alignedserve.cluster.launch import _claimed
from alignedserve.cluster.machine import GpusTaken, claim_gpus, free_by_uuid, this_machine, with_gpus
from alignedserve.cluster.memory_planner import Machine, choose_sizes
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.costmodel.hardware import HARDWARE
from alignedserve.runtime.device_check.choice import DeviceChoice
from alignedserve.scheduling.factory import resolve_policy
from tests.unit.cluster.test_sizing import LARGEST

GIB = 1024**3
UUIDS = ("1a2b", "3c4d")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Two GPUs of 80 GiB each."""

    def properties(gpu: str | int) -> SimpleNamespace:
        index = gpu if isinstance(gpu, int) else torch.device(gpu).index
        clocks = {"clock_rate": 1_980_000, "memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
        sizes = {"total_memory": 80 * GIB, "multi_processor_count": 132}
        return SimpleNamespace(name="H100", major=9, minor=0, uuid=UUIDS[index], **clocks, **sizes)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr("kernels.float8_linear.has_float8_products", lambda device: True)
    return ("cuda:0", "cuda:1")


# --- claims


def test_a_second_cluster_gets_what_the_first_has_left(gpus: tuple[str, ...], tmp_path: Path) -> None:
    first = claim_gpus(gpus[:1], tmp_path)
    second = claim_gpus(gpus, tmp_path)
    assert (first.gpus, second.gpus) == (("cuda:0",), ("cuda:1",))
    with pytest.raises(GpusTaken, match="other clusters on this host have every GPU; stop them, serve all models in"):
        claim_gpus(gpus, tmp_path)
    with pytest.raises(GpusTaken, match="another cluster has cuda:1"):
        claim_gpus(gpus[1:], tmp_path)
    second.close()
    assert claim_gpus(gpus, tmp_path).gpus == ("cuda:1",)


def test_a_claim_ends_with_its_cluster(gpus: tuple[str, ...], tmp_path: Path) -> None:
    claims = claim_gpus(gpus, tmp_path)
    del claims
    gc.collect()
    assert claim_gpus(gpus, tmp_path).gpus == gpus


def test_a_claim_ends_with_a_process_that_is_killed(gpus: tuple[str, ...], tmp_path: Path) -> None:
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    path = tmp_path / f"gpu-{UUIDS[0]}.lock"
    with subprocess.Popen(
        [sys.executable, "-c", f"{hold}; time.sleep(60)", str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert claim_gpus(gpus, tmp_path).gpus == ("cuda:1",)
        process.kill()
        process.wait()
    assert claim_gpus(gpus, tmp_path).gpus == gpus


def test_none_are_claimed_on_a_cpu(tmp_path: Path) -> None:
    assert claim_gpus((), tmp_path).gpus == ()


def test_auto_computes_on_the_cpu_where_all_gpus_are_taken(
    gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.cluster.launch.make_run_root", lambda: tmp_path)
    monkeypatch.setattr("alignedserve.cluster.launch.choose_device", lambda name: DeviceChoice("cuda"))
    claims = claim_gpus(gpus, tmp_path)
    choice, none = _claimed("auto")
    assert (choice.device, choice.is_warning, none.gpus) == ("cpu", True, ())
    assert "have every GPU" in choice.remark
    with pytest.raises(GpusTaken):
        _claimed("cuda")
    claims.close()
    assert _claimed("auto")[1].gpus == gpus


# --- memory


def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int = 0) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'X'\n{text}\nX\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(tool))


@pytest.mark.usefixtures("gpus")
def test_memory_that_others_have_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, tmp_path, "GPU-1a2b, 81000\nGPU-3c4d, 30000\nGPU-5e6f, 1")
    assert this_machine("cuda").gpu_bytes == (81000 * 1024**2, 30000 * 1024**2)
    assert this_machine("cuda:1").gpu_bytes == (30000 * 1024**2,)
    gpu = this_machine("cuda").gpu
    assert gpu is not None
    assert gpu.memory_bytes_per_s == pytest.approx(HARDWARE["h100"].memory_bytes_per_s, rel=0.01)
    assert "up to 288 a worker (by memory and estimated times, room for " in doctor._requests_at_a_time()


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("text", "code"), [("GPU-1a2b, [N/A]", 0), ("", 0), ("GPU-1a2b, 5", 9)])
def test_what_the_drivers_tool_does_not_say_is_all_there(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, tmp_path, text, code)
    assert free_by_uuid() == {}
    assert this_machine("cuda").gpu_bytes == (80 * GIB, 80 * GIB)


def test_gpus_of_others_are_left_out() -> None:
    machine = Machine(GIB, GIB, 2, True, gpu_bytes=(1, 2, 3))
    assert with_gpus(machine, ("cuda:0", "cuda:1", "cuda:2"), ("cuda:0", "cuda:2")).gpu_bytes == (1, 3)


@pytest.mark.parametrize("topology", ["elastic", "disaggregated"])
@pytest.mark.parametrize("free", [79 * GIB, 45 * GIB])
def test_an_8b_model_is_served_with_defaults(topology: str, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=200 * GIB))
    statvfs = SimpleNamespace(f_bavail=100 * GIB, f_frsize=1)
    monkeypatch.setattr("alignedserve.cluster.preflight.os.statvfs", lambda _: statvfs)
    gpus = (free,) if topology == "elastic" else (free, free)
    machine = Machine(200 * GIB, 100 * GIB, 16, True, gpu_bytes=gpus)
    config = resolve_policy(from_mapping({"topology": topology, "engine": {"device": "cuda"}}))
    choice = choose_sizes(config, LARGEST, machine)
    assert choice.served.max_context_len == 131_072
    assert choice.config.decode.max_running_requests == (1024 if free > 60 * GIB else 736)
    assert f"up to {choice.config.decode.max_running_requests} requests at a time" in choice.line()
    served = replace(choice.served, has_random_weights=True)
    preflight.check_configuration(choice.config, served)
    preflight.check_machine(choice.config, served, ())
    beside = free - served.weight_bytes - choice.config.decode.kv_cache_bytes
    assert beside > free // 10 + GIB // 2  # for passes, graphs, libraries and the context of CUDA itself

"""The choice of a worker's device, and the errors where it is unavailable."""

import dataclasses
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.core.errors import ConfigError, NotEnoughMemory
from alignedserve.runtime.device import devices
from alignedserve.runtime.device.devices import cuda_obstacle, driver_version, fitting_torch, remarks, worker_devices
from alignedserve.runtime.engine import worker_engine
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.served_model import resolve_model

MIB = 1024 * 1024
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver.\n (Triggered internally at somewhere.)"
)


class Gpus:
    """PyTorch as it would be beside so many GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, warning: str | None = None) -> None:
        self._count, self._warning = count, warning
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", self.is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    def is_available(self) -> bool:
        if self._warning is not None:
            warnings.warn(self._warning, stacklevel=1)
        return self._count > 0


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_workers_compute_on_the_cpu_unless_a_gpu_was_chosen(name: str) -> None:
    assert worker_devices(name, 3) == ["cpu"] * 3


def test_every_worker_gets_a_gpu_as_far_as_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    assert worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("cuda:1", 3) == ["cuda:1"] * 3
    with pytest.raises(ConfigError, match=r"engine\.device is cuda:2, but the last GPU here is cuda:1"):
        worker_devices("cuda:2", 1)


def test_a_pytorch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"engine\.device is cuda, but this PyTorch is built for CPUs alone"):
        worker_devices("cuda", 1)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"no NVIDIA GPU is visible here; does nvidia-smi show one\?"):
        worker_devices("cuda", 1)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 0, TOO_OLD)
    obstacle = cuda_obstacle()
    assert obstacle is not None
    assert obstacle.endswith("is too old (found version 11040). Please update your GPU driver.")


def test_on_a_gpu_weights_and_cache_are_bfloat16_unless_told_otherwise() -> None:
    assert resolve_model(ModelSectionConfig(), EngineConfig(device="cuda")).dtype == "bfloat16"
    assert resolve_model(ModelSectionConfig(dtype="float16"), EngineConfig(device="cuda:1")).dtype == "float16"
    assert resolve_model(ModelSectionConfig(), EngineConfig(device="auto")).dtype == "float32"


def refused(monkeypatch: pytest.MonkeyPatch, device: str, free: int, others: int = 0) -> str:
    monkeypatch.setattr(worker_engine, "free_bytes", lambda _: free)
    monkeypatch.setattr(worker_engine, "used_by_others", lambda _: others)
    served = dataclasses.replace(resolve_model(ModelSectionConfig()), has_random_weights=True)
    with pytest.raises(NotEnoughMemory) as caught:
        ModelExecutor(served, EngineSizes(2048 * MIB, 4, 16, 1, device=device))
    return str(caught.value)


def test_too_little_memory_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, "cuda:0", 1024 * MIB)
    assert "a worker on cuda:0 needs" in said
    assert "768 MiB are available; at most 7" in said  # 256 are left for what a pass works with
    assert "MiB of blocks would fit: set prefill.kv_cache_bytes and decode.kv_cache_bytes lower" in said
    assert "; other processes have 40960 MiB of it" in refused(monkeypatch, "cuda:0", 1024 * MIB, 40960 * MIB)
    assert "the weights alone do not fit: choose a smaller model" in refused(monkeypatch, "cuda:0", 260 * MIB)
    assert "1024 MiB are available; at most 9" in refused(monkeypatch, "cpu", 1024 * MIB)  # beside grammars


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1)

    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 140 * 1024 * MIB, 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert devices.describe_gpus() == ["cuda:0 NVIDIA H200, 140 GiB, compute capability 9.0"]


ADA, HOPPER = SimpleNamespace(name="NVIDIA L40S"), SimpleNamespace(name="NVIDIA H100 80GB HBM3")
SLICE = SimpleNamespace(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")


@pytest.mark.parametrize("driver", ["580.95.05", "615.10", None, "nonsense"])
def test_a_driver_that_is_new_enough_or_unknown_needs_no_other_pytorch(driver: str | None) -> None:
    assert fitting_torch(driver, "13.0", "2.13.0") is None


def test_a_driver_of_cuda_12_is_named_with_the_build_that_fits() -> None:
    said = fitting_torch("535.183.01", "13.0", "2.13.0+cu130")
    assert said is not None
    assert re.match(r"driver 535.183.01 is older than 580, .* pip install torch==2.13.0 --index-url \S+/cu126$", said)
    assert fitting_torch("535.183.01", "12.6", "2.13.0") is None
    assert str(fitting_torch("470.256.02", "13.0", "2.13.0")).endswith("which CUDA 13.0 needs: update it")


def test_the_obstacle_of_a_machine_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "driver_version", lambda: "550.54.15")
    said = cuda_obstacle()
    assert said is not None
    assert said.startswith("driver 550.54.15 is older than 580")


def test_the_driver_is_asked_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("580.95.05\n")
    assert driver_version(file) == "580.95.05"


def test_slices_and_kinds_are_named() -> None:
    assert remarks([HOPPER, HOPPER]) == []
    (kinds,) = remarks([HOPPER, ADA])
    assert kinds.startswith("GPUs of 2 kinds (NVIDIA H100 80GB HBM3, NVIDIA L40S)")
    (slices,) = remarks([SLICE])
    assert slices.startswith("cuda:0: a slice of a GPU (MIG)")

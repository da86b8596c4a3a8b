"""Drivers that are too old, slices of GPUs and GPUs of two kinds are named, with what to do."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignedserve.runtime.device import devices
from alignedserve.runtime.device.devices import cuda_obstacle, driver_version, fitting_torch, remarks

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

"""What machines with NVIDIA GPUs install: pins that go together, and a build of PyTorch that their driver runs."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.check_wheels import main, requirements
from scripts.install import CPU_INDEX, CUDA_12_INDEX, driver_of, torch_index

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


def test_kernels_are_tested_with_the_triton_that_is_pinned() -> None:
    pytest.importorskip("triton")
    assert importlib.metadata.version("triton") == PINS["triton"]


def test_the_check_is_of_cudas_pytorch_its_triton_and_the_extra() -> None:
    names = [re.split(r"[^\w.-]", one)[0] for one in requirements(PROJECT, PINS["torch"], has_all=False)]
    assert names == ["torch", "triton", "flash-attn-4"]
    assert f"torch==={PINS['torch']}" in requirements(PROJECT, PINS["torch"], has_all=True)


def test_everything_that_the_extra_names_is_pinned() -> None:
    (flash,) = PROJECT["optional-dependencies"]["gpu"]
    assert flash.startswith("flash-attn-4[cu13]")
    assert PINS["flash-attn-4"] in flash


@pytest.mark.parametrize(
    ("said", "index"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025", ()),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.148.08  Release Build", CUDA_12_INDEX),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May 2 2024", CPU_INDEX),
        ("something that nobody can read", ()),
        (None, CPU_INDEX),
    ],
)
def test_a_machine_gets_the_pytorch_that_its_driver_runs(
    said: str | None, index: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "version"
    if said is not None:
        file.write_text(said)
    assert tuple(torch_index(driver_of(file))) == index


@pytest.mark.slow
def test_pins_that_cudas_pytorch_contradicts_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Triton 3.9.0 was pinned once: PyTorch's CPU wheel asks for none, so that nothing else here could see it."""
    other = tmp_path / "constraints.txt"
    other.write_text(
        re.sub(r"^triton==.*$", "triton==3.9.0", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    )
    code, said = main(["--constraints", str(other)]), capsys.readouterr().out
    if "not checked" in said:
        pytest.skip(said)
    assert code == 1
    assert "conflicting dependencies" in said

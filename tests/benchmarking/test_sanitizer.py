"""The sanitizer's part of the GPU benchmark: refused by name where it cannot run, and what it finds is a failure."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import sanitizer

PASSES = (sys.executable, "-c", "print('{\"ok\": true}')")


def run(device: str, monkeypatch: pytest.MonkeyPatch, tool: str | None) -> tuple[dict[str, Any], int]:
    monkeypatch.setattr(sanitizer, "_CHECK", PASSES)
    monkeypatch.setattr(sanitizer, "_WHERE", "/nowhere")
    monkeypatch.setattr("shutil.which", lambda name: tool)
    told: list[dict[str, Any]] = []
    found = sanitizer.sanitize_self_check(torch.device(device), time.monotonic() + 60.0, told.append)
    return found, len(told)


def test_without_a_gpu_the_self_check_alone_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, num_told = run("cpu", monkeypatch, None)
    assert (found["failures"], found["left_out"], num_told) == ([], ["compute-sanitizer needs a GPU"], 1)


def test_without_the_tool_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = run("cuda", monkeypatch, None)
    assert found["left_out"] == ["compute-sanitizer is not installed: it comes with the CUDA toolkit"]


@pytest.mark.parametrize(("code", "failures"), [(0, 0), (86, 3), (1, 3)])
def test_every_tool_runs_and_what_it_finds_fails(
    code: int, failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\necho '========= Invalid __global__ read of size 4'\necho '\"ok\": true'\nexit {code}\n"
    )
    tool.chmod(0o755)
    found, num_told = run("cuda", monkeypatch, str(tool))
    assert list(found["seconds"]) == ["self-check", "memcheck", "racecheck", "initcheck"]
    assert (len(found["failures"]), num_told) == (failures, 4)

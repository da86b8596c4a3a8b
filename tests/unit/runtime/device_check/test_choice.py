"""engine.device=auto: GPUs that have passed the self-check, remembered; else the CPU, with the reason."""

import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport, agreed_device, joining_device
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, TokenLogprob
from alignedserve.runtime.device import devices
from alignedserve.runtime.device.devices import obstacle_on, require_kinds
from alignedserve.runtime.device_check import choice as choices
from alignedserve.runtime.device_check.choice import DeviceChoice, choose_device
from alignedserve.runtime.device_check.self_check import _difference

PASSES = (sys.executable, "-c", 'import pathlib, sys; print("noise"); print(\'{"ok": true, "failure": null}\')')


class Gpus:
    """PyTorch as it would be beside so many GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0, uuid="GPU-1")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: self.properties)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch, 2)


# --- auto


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_is_named_is_not_checked(name: str) -> None:
    assert choose_device(name, lambda gpu: pytest.fail("was checked")) == DeviceChoice(name)


def test_without_a_gpu_auto_is_the_cpu_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 0)
    assert choose_device("auto", lambda gpu: pytest.fail("was checked")) == DeviceChoice("cpu")


@pytest.mark.usefixtures("gpus")
def test_gpus_that_pass_are_taken_and_named() -> None:
    checked: list[str] = []
    choice = choose_device("auto", checked.append)
    assert checked == ["cuda:0", "cuda:1"]
    assert (choice.device, choice.is_warning) == ("cuda", False)
    assert "engine.device=auto takes cuda:0 NVIDIA H200, 140 GiB" in choice.remark
    assert choice.remark.endswith("the self-check has passed")


@pytest.mark.usefixtures("gpus")
def test_one_gpu_that_fails_leaves_all_to_the_cpu_and_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose_device("auto", {"cuda:0": None, "cuda:1": "log-probabilities differ by 0.5"}.get)
    assert choice.device == "cpu"
    with caplog.at_level(logging.INFO):
        choice.log()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cuda:1 IS NOT USED, workers compute on the CPU: log-probabilities differ by 0.5" in record.getMessage()
    assert "engine.device=cuda takes the GPU nevertheless" in record.getMessage()


# --- the check, in a process of its own, and what is remembered


@pytest.mark.usefixtures("gpus")
def test_a_check_that_passed_is_not_repeated(tmp_path: Path) -> None:
    assert obstacle_on("cuda:0", tmp_path, PASSES) is None
    assert obstacle_on("cuda:0", tmp_path, ("no such command",)) is None


@pytest.mark.parametrize("changed", ["driver", "torch", "gpu", "code"])
def test_it_is_repeated_where_anything_has_changed(
    changed: str, gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert obstacle_on("cuda:0", tmp_path, PASSES) is None
    if changed == "driver":
        monkeypatch.setattr(devices, "driver_version", lambda: "999.1")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif changed == "gpu":
        gpus.properties.uuid = "GPU-2"
    else:
        monkeypatch.setattr(devices, "code_digest", lambda: "other")
    assert obstacle_on("cuda:0", tmp_path, (sys.executable, "-c", "raise SystemExit(3)")) is not None


@pytest.mark.usefixtures("gpus")
def test_a_failure_is_asked_again(tmp_path: Path) -> None:
    fails = (sys.executable, "-c", f"print({json.dumps(json.dumps({'ok': False, 'failure': 'differs by 2'}))})")
    assert obstacle_on("cuda:0", tmp_path, fails) == "differs by 2"
    assert obstacle_on("cuda:0", tmp_path, PASSES) is None


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("import sys; sys.exit('CUDA error: an illegal memory access')", 60.0, "ended with 1: CUDA error: an illegal"),
        ("import os; os.abort()", 60.0, "ended with -6"),
        ("import time; time.sleep(60)", 0.2, "did not end within 0 s"),
        ("print('[]')", 60.0, "said nothing that can be read"),
        ("print('{')", 60.0, "said nothing that can be read"),
        ("pass", 60.0, "said nothing that can be read"),
    ],
)
def test_a_check_that_crashes_or_hangs_is_a_failure(code: str, limit_s: float, said: str, tmp_path: Path) -> None:
    reason = obstacle_on("cuda:0", tmp_path, (sys.executable, "-c", code), limit_s)
    assert reason is not None
    assert said in reason


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000])
def test_a_file_that_someone_else_wrote_is_no_verdict(content: bytes, tmp_path: Path) -> None:
    assert obstacle_on("cuda:0", tmp_path, PASSES) is None
    (kept,) = (tmp_path / "gpu-checks").iterdir()
    kept.write_bytes(content)
    assert obstacle_on("cuda:0", tmp_path, (sys.executable, "-c", "raise SystemExit(3)")) is not None


@pytest.mark.usefixtures("gpus")
def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert obstacle_on("cuda:0", tmp_path / "file", PASSES) is None


def test_the_digest_covers_every_room_of_the_engine() -> None:
    names = {"/".join(path.parts[-3:]) for path in devices.code_files()}
    assert {"engine/steps/step_passes.py", "engine/sampling/sampler.py", "kernels/gpu/__init__.py"} <= names


@pytest.mark.parametrize("place", [0, 1])
def test_log_probabilities_that_are_not_numbers_fail_wherever_they_are(place: int) -> None:
    def tokens(*values: float) -> list[SampledToken]:
        return [SampledToken(RequestId("0"), 7, TokenLogprob(7, value, (), 1)) for value in values]

    found = tokens(*(math.nan if index == place else -1.0 for index in range(2)))
    assert _difference(found, tokens(-1.0, -1.0), torch.float32, 5e-3) is not None
    assert _difference(tokens(-1.0, -1.0), tokens(-1.0, -1.0), torch.float32, 5e-3) is None


def test_the_default_check_keeps_what_passed_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    seen: list[Path] = []

    def check(gpu: str, folder: Path) -> None:
        seen.append(folder)

    monkeypatch.setattr(choices, "obstacle_on", check)
    assert choose_device("auto").device == "cuda"
    assert set(seen) == {Path.home() / ".cache" / "alignedserve"}


# --- several hosts


def node(name: str) -> RayNode:
    return RayNode(name, "10.0.0.1", name, is_head=False, num_cpus=4.0, num_gpus=1.0)


GPU = NodeReport("v", Machine(1, 1, 1, True, (140 << 30,), has_float8=True), ("cuda:0",))
PLAIN = NodeReport("v", Machine(1, 1, 1, True))
FAILING = NodeReport("v", Machine(1, 1, 1, True), device_remark="cuda:0 IS NOT USED")
BROKEN = NodeReport("v", problem=ConfigError("no"))


def test_all_nodes_have_one_device() -> None:
    a, b, c = node("a"), node("b"), node("c")
    choice, reports = agreed_device("auto", {a: GPU, b: GPU, c: BROKEN})
    assert (choice.device, reports) == ("cuda", {a: GPU, b: GPU, c: BROKEN})
    choice, reports = agreed_device("auto", {a: GPU, b: PLAIN})
    assert (choice.device, choice.is_warning) == ("cpu", True)
    assert reports == {a: PLAIN, b: PLAIN}
    choice, _ = agreed_device("auto", {a: GPU, b: FAILING})
    assert "b: cuda:0 IS NOT USED" in choice.remark.replace(str(b), "b")
    assert agreed_device("auto", {a: PLAIN})[0] == DeviceChoice("cpu")
    assert agreed_device("cuda", {a: GPU, b: BROKEN})[0] == DeviceChoice("cuda")


GPU_NODE = NodeReport("v", gpus=("cuda:0",))
CHECKED = joining_device("auto", DeviceChoice("cuda", "the self-check has passed"))


def test_a_node_that_joins_is_asked_as_the_first_ones_were() -> None:
    assert CHECKED.asked == "auto"
    assert CHECKED.refusal(GPU_NODE) is None
    refusal = CHECKED.refusal(NodeReport("v", device_remark="cuda:0 IS NOT USED: differs by 2"))
    assert refusal is not None
    assert refusal.endswith("this node would not: cuda:0 IS NOT USED: differs by 2")
    assert str(CHECKED.refusal(NodeReport("v"))).endswith("no NVIDIA GPU is visible there")


# --- kinds of layers


@pytest.mark.usefixtures("gpus")
def test_a_kind_of_layers_is_checked_once_and_what_fails_is_named(tmp_path: Path) -> None:
    on_cpu = "engine.device=cpu"
    kinds = {"latent attention": on_cpu, "Mamba-2": on_cpu}
    require_kinds("cuda:0", kinds, tmp_path, PASSES)
    fails = ("sh", "-c", 'echo \'{"ok": false, "failure": "other tokens are drawn"}\'')
    require_kinds("cuda:0", kinds, tmp_path, fails)  # remembered: it is not run
    said = "cuda:0 does not compute capped scores as a CPU does: other tokens are drawn. Set engine.device=cpu"
    with pytest.raises(ConfigError, match=said):
        require_kinds("cuda:0", {**kinds, "capped scores": on_cpu}, tmp_path, fails)
    with pytest.raises(ConfigError, match=r"its check ended with 3: nothing was said.*Set engine\.window_cache=whole"):
        require_kinds("cuda:0", {"windows that forget": "engine.window_cache=whole"}, tmp_path, ("sh", "-c", "exit 3"))

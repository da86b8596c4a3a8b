"""benchmarks.gpu: targets from figures, parts that crash or hang, the log of tests; all of it at toy size (slow)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.kernel_tests import SeenTests, read_log
from benchmarks.gpu.part_list import PART_LIST, WITH_TARGETS, ListedPart
from benchmarks.gpu.seen import PAGES, recorded, with_seen
from benchmarks.gpu.targets import MET, MISSED, NOT_MEASURED, outcomes
from benchmarks.measuring import device_choice
from benchmarks.measuring.recording import RESULTS


def decode(case: str, by: str, gb_per_s: float, against: float | None = None) -> dict[str, Any]:
    return {"kernel": "decode", "case": case, "by": by, "gb_per_s": gb_per_s, "against_aligned": against}


def kernels(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"ceilings": {"copy_gb_per_s": 4000.0}, "rows": list(rows)}


def iteration(kind: str, ratio: float, what: str = "") -> dict[str, Any]:
    return {"kind": kind, "what": what, "ratio": ratio, "milliseconds": 2.0, "bound_milliseconds": 1.0}


def pinned(operation: str, share: float) -> dict[str, Any]:
    return {"transport": "pinned", "operation": operation, "share": share, "gb_per_s": 45.0, "plain_gb_per_s": 50.0}


EVEN, MIXED = "64 x 4096", "60 x 256 + 4 x 16384"
FIGURES: dict[str, dict[str, Any]] = {
    "kernels": kernels(
        decode(EVEN, "torch", 1.0),
        decode(EVEN, "triton", 3500.0),
        decode(MIXED, "triton", 3000.0, 1.2),
        decode(MIXED, "undivided", 300.0, 9.0),
    ),
    "iterations": {
        "rows": [iteration("decode", 1.25), iteration("prefill", 0.6), iteration("decode beside copies", 1.01)]
    },
    "transfers": {"rows": [pinned("offload", 0.5), pinned("offload", 0.95), pinned("prefetch", 0.89)]},
}


def test_every_target_is_met_or_missed() -> None:
    found = outcomes(FIGURES, is_toy=False)
    assert [one.verdict for one in found] == [MET, MISSED, MET, MISSED, MET, MET, MISSED]
    assert found[0].seen == "87.5% (3,500 of 4,000 GB/s)"
    assert found[1].seen == "1.2 times (naive kernel 9 times)"
    assert found[5].seen == "95.0% (45.0 of 50.0 GB/s)"


def test_a_toy_meets_nothing() -> None:
    found = outcomes(FIGURES, is_toy=True)
    assert {one.verdict for one in found} == {NOT_MEASURED}
    assert all(one.seen for one in found)


def test_what_a_part_did_not_come_to_is_not_measured() -> None:
    parts = {
        "kernels": kernels(decode(EVEN, "torch", 1.0)),
        "iterations": {"rows": []},
    }
    assert {(one.seen, one.verdict) for one in outcomes(parts, is_toy=False)} == {("", NOT_MEASURED)}
    assert {one.verdict for one in outcomes({"kernels": {}, "transfers": {}}, is_toy=False)} == {NOT_MEASURED}


def test_tests_are_counted_in_a_log_that_ends_anywhere() -> None:
    log = (
        "tests/a.py::one PASSED [ 1%]\ntests/a.py::two[x - y] FAILED [ 2%]\n"
        "tests/a.py::three SKIPPED (why) [ 3%]\ntests/a.py::four PAS"
    )
    seen = SeenTests({"passed": 1, "failed": 1, "skipped": 1}, ["tests/a.py::two[x - y]"], [])
    assert read_log(log) == seen
    spread = (
        "[gw0] [  1%] PASSED tests/a.py::one \n[gw12] [ 13%] FAILED tests/a.py::two[x - y] \n"
        "tests/a.py::four \n[gw0] [ 14%] SKIPPED tests/a.py::three \n"
    )
    assert read_log(spread) == seen


def test_files_without_their_packages_are_left_out_by_name_and_broken_ones_have_failed() -> None:
    log = (
        "=== ERRORS ===\n___ ERROR collecting tests/a.py ___\ntests/a.py:3: in <module>\n    import msgspec\n"
        "E   ModuleNotFoundError: No module named 'msgspec'\n___ ERROR collecting tests/b.py ___\n"
        "E   AttributeError: module 'pytest' has no attribute 'ParameterSet'\n=== 2 errors ===\n"
    )
    assert read_log(log) == SeenTests({}, ["tests/b.py"], ["tests/a.py: msgspec is not installed"])


PARTS = """
import json, os, sys, time
part, folder = sys.argv[1], sys.argv[3]
def write(figures):
    with open(f"{folder}/gpu_{part}.json", "w") as file:
        json.dump({"figures": figures}, file)
if part == "good":
    write({"rows": [1]})
elif part == "failing":
    write({"failures": ["wrong"], "left_out": ["no second GPU"]})
elif part == "crashing":
    write({"rows": [2]})
    print("the last words", flush=True)
    os.abort()
else:
    time.sleep(600)
"""


def listed(name: str) -> ListedPart:
    return ListedPart(name, 1.0, "", "part", "nowhere:none")


@pytest.fixture
def fake_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PART_COMMAND", (sys.executable, "-c", PARTS))


@pytest.mark.usefixtures("fake_parts")
def test_a_part_that_crashes_or_hangs_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = gpu.Runner([], tmp_path / "out", 60.0)
    runner.run([listed(name) for name in ("crashing", "failing", "good")])
    crashing, failing, good = runner.ended
    assert crashing.failures == ["ended by signal 6"]
    assert "the last words" in crashing.log
    assert (failing.failures, failing.left_out) == (["wrong"], ["no second GPU"])
    assert good.failures == []
    assert runner.figures == {
        "crashing": {"rows": [2]},
        "failing": {"failures": ["wrong"], "left_out": ["no second GPU"]},
        "good": {"rows": [1]},
    }
    assert json.loads((tmp_path / "out" / "gpu_crashing.json").read_text())["figures"] == {"rows": [2]}
    assert "the last words" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_parts")
def test_a_part_that_hangs_is_ended() -> None:
    runner = gpu.Runner([], None, 1.0)
    runner.run([listed("hanging")])
    assert runner.ended[0].failures == ["ended after 1 s"]
    assert runner.figures == {"hanging": {}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--device", "cpu"], "on a CPU only --toy makes sense"),
        (["--device", "cuda"], "--device cuda cannot be had: no GPU"),
        ([], "on a CPU only --toy makes sense (no GPU)"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (gpu, device_choice):
        monkeypatch.setattr(module, "cuda_obstacle", lambda: "no GPU")
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_every_part_is_listed_with_its_minutes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--list"])
    assert gpu.main() == 0
    listed = capsys.readouterr().out
    assert all(part.name in listed for part in PART_LIST)
    assert max(part.minutes for part in PART_LIST) < 9.0


def test_a_part_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--toy", "--device", "cpu", "--parts", "products,no-such"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no part 'no-such'; there are sanitizer, tests," in capsys.readouterr().err


WITH_OWN_TESTS = ("tests", "promise")
SLICES = [part.name for part in PART_LIST if part.name not in (*WITH_TARGETS, *WITH_OWN_TESTS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_every_slice_runs_to_its_end_without_a_gpu(name: str, tmp_path: Path) -> None:
    """At toy size, its kernels in Triton's interpreter."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.parts",
        name,
        "--toy",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / f"gpu_{name}.json").read_text())["figures"]
    assert figures["is_complete"]
    assert figures["failures"] == []
    assert any(figures.get(measured) for measured in ("rows", "batches", "seconds", "kinds"))


def test_pages_have_what_was_recorded_of_a_gpu() -> None:
    """`python -m benchmarks.gpu.seen` writes it."""
    for page in (path.read_text() for path in PAGES):
        assert with_seen(page, recorded(RESULTS / "gpu")) == page

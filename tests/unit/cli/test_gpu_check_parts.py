"""Parts of `alignedserve gpu-check`: those that crash or hang cost themselves alone; all of them at toy size."""

import json
import sys
from pathlib import Path

import pytest

from lab.gpu_check import check
from lab.gpu_check.check import RIGHT, WRONG, CheckSpec, run_check
from lab.gpu_check.part_list import PARTS, CheckPart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# In place of a part: `crash`, `hang` or nothing behind the name of the file that it writes.
STAND_IN = """
import json, os, sys, time
name, file = sys.argv[1:3]
json.dump({"rows": [1], "failures": [], "left_out": []}, open(file, "w"))
if name == "crash":
    os.abort()
if name == "hang":
    time.sleep(100)
"""


def test_a_part_that_crashes_or_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(check, "_COMMAND", (sys.executable, str(script)))
    file, said = tmp_path / "found.json", list[str]()
    parts = tuple(CheckPart(name, 1.0, name) for name in ("crash", "hang", "right"))
    assert run_check(CheckSpec("cpu", 9.0, True, file), said.append, parts) == WRONG
    found = json.loads(file.read_text())
    assert found["failures"] == ["crash: ended by signal 6", "hang: ended after 4 s"]
    assert {name: part["rows"] for name, part in found["parts"].items()} == {part.name: [1] for part in parts}
    assert found["machine"]["gpus"] == []


def test_every_part_runs_to_its_end_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "found.json"
    assert run_check(CheckSpec("cpu", 500.0, True, file), print) == RIGHT
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    assert len(parts["kernels"]["rows"]) > 12
    assert parts["answers"]["ours"] == parts["answers"]["theirs"]
    assert parts["speed"]["rows"]
    assert parts["links"]["rows"]

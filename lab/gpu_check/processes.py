"""Runs a part in a process of its own, which may crash or hang without harm to others."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_part(
    command: Sequence[str], limit_s: float, log: Path, env: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """Run a command for so long at most; return what went wrong, None for nothing, and everything that it printed.

    Processes that it has started end with it. `log`: a file that is written. `env`: in place of this process's.
    """
    with log.open("w+", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603  (this Python, our own modules)
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
        try:
            problem = _problem(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            problem = f"ended after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return problem, output.read()


def _problem(code: int) -> str | None:
    if code == 0:
        return None
    return f"ended by signal {-code}" if code < 0 else f"ended with {code}"

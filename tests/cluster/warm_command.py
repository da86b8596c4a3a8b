"""`alignedserve` in a process of its own for each call, all forked from one that has imported what the command imports.

Importing takes most of the time of a command that is refused in a few milliseconds, or only asks a running cluster.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_PARENT = """
import atexit, importlib, json, os, sys
from alignedserve.cli.main import main

importlib.import_module("alignedserve.cli.commands." + sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    process_id = os.fork()
    if process_id == 0:
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.argv = ["alignedserve", *asked["arguments"]]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to free what was imported takes two seconds
    print(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]), flush=True)
"""


class WarmCommand:
    """Runs the command as a process of its own; used as a context manager."""

    def __init__(
        self, folder: Path, module: str = "serving.serve", environment: Mapping[str, str] | None = None
    ) -> None:
        """`folder` gets what it prints. `module`: of the command. `environment`: while it is imported, as Ray's is."""
        self._folder = folder
        self._module = module
        self._environment = environment
        self._turn = threading.Lock()

    def __enter__(self) -> "WarmCommand":
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, self._module],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._parent:
            assert self._parent.stdin is not None
            self._parent.stdin.close()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Return the exit code and what it printed."""
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        asked = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        with self._turn:
            self._parent.stdin.write(json.dumps(asked) + "\n")
            self._parent.stdin.flush()
            code = int(self._parent.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())

"""A process of our own that answers frames with frames, for work that must not hold up, or bring down, this one."""

import math
import resource
import subprocess
import sys
import time
from contextlib import suppress
from threading import Timer
from typing import IO

from alignedserve.process.frames import read_frame, write_frame

_START = "import importlib, sys; sys.path[:] = sys.argv[2:]; importlib.import_module(sys.argv[1]).main()"


class ChildProcess:
    """The process, while it runs. The child exits when its stdin closes, that is, when this process ends. Used by one
    thread at a time."""

    def __init__(self, module: str, max_wall_s: float) -> None:
        """`module`: its `main` answers frames until its input ends. `max_wall_s`: an answer takes no longer."""
        self._module = module
        self._max_wall_s = max_wall_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self.end()
        command = [sys.executable, "-c", _START, self._module, *sys.path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603

    def send(self, *frames: bytes) -> None:
        """Write frames that have no answer; whether it read them, the next answer tells."""
        assert self._process is not None, "a process that was started"
        with suppress(OSError):
            for frame in frames:
                write_frame(_stream(self._process.stdin), frame)

    def answer(self, *frames: bytes) -> bytes | None:
        """Return the answer to these frames together; None: the process has ended over them."""
        assert self._process is not None, "a process that was started"
        timer = Timer(self._max_wall_s, self._process.kill)
        timer.start()
        try:
            for frame in frames:
                write_frame(_stream(self._process.stdin), frame)
            return read_frame(_stream(self._process.stdout))
        except OSError:
            return None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill a running child; a waiting `answer` returns None. From any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(OSError), process:  # closes the pipes, and waits
            pass


def bound_time(max_cpu_s: float) -> None:
    """Let the system end this process, such a child, after this much more work; it counts whole seconds."""
    limit = math.ceil(time.process_time() + max_cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "a process with pipes"
    return pipe

"""A child process that computes a part of a step, connected by sockets."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

_END_S = 10.0  # for a process to end once its connections are closed


class ConnectedProcess:
    """The process, until it is ended. The child ends with this process: a pipe closes."""

    def __init__(self, module: str, ends: Sequence[socket.socket], descriptors: Sequence[int] = ()) -> None:
        """Run a module with the numbers of its ends of connections and, last, of the pipe. `ends`: closed here
        afterwards. `descriptors`: further inherited files, with the same numbers."""
        their_lifeline, self._lifeline = os.pipe()
        numbers = [*(end.fileno() for end in ends), their_lifeline]
        command = [sys.executable, "-m", module, *map(str, numbers)]
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                pass_fds=[*numbers, *descriptors],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
            )
        finally:
            for end in ends:
                end.close()
            os.close(their_lifeline)

    def wait(self) -> int:
        """Wait until it has ended; return its status. From any thread."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait for the end after the connections have closed; kill a process that hangs."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def end_with_parent(lifeline: int) -> None:

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()

"""What `serve` does when Ray was lost on this host: it starts anew in its own place, or ends with a code of its own.

In its own place: the process becomes its successor, with the same id, terminal and supervisor. Nothing of what Ray
keeps in a process has to be taken down, which may hang without Ray's head."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from alignedserve.cli.console import notes, print_error
from alignedserve.config.environment import NODE_LOSSES_VARIABLE, node_losses
from alignedserve.core.errors import NodeLost

_MAX_LOSSES = 5  # in a row
_SETTLED_S = 120.0  # after which one has served, and the next loss is a first one again
_FIRST_PAUSE_S = 1.0
_OPEN_FILES = Path("/dev/fd")  # on Linux a link to /proc/self/fd


class NodeLosses:
    """The losses of Ray in a row, and what follows. To be made before Ray is started, which changes the environment."""

    def __init__(self) -> None:
        self._num_before = node_losses()
        self._environment = dict(os.environ)
        self._began_s = time.monotonic()

    def pause(self) -> None:
        if self._num_before:
            time.sleep(_FIRST_PAUSE_S * 2 ** (self._num_before - 1))

    def go_on_after(self, error: NodeLost, *, is_wanted: bool) -> NoReturn:
        """Start this command again, unless that is not wanted or has not helped before. Nothing else runs any more. At
        once: what Ray has left of itself in this process may still break it."""
        has_served = time.monotonic() - self._began_s > _SETTLED_S
        num_losses = 1 if has_served else self._num_before + 1
        if not is_wanted or num_losses > _MAX_LOSSES:
            print_error(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(os.EX_TEMPFAIL)
        notes().print(f"{error}. Starting again …", markup=False, soft_wrap=True)
        self._become_successor(num_losses)

    def _become_successor(self, num_losses: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # what is ignored would be for the successor as well
        _close_files_on_exec()
        os.execve(  # noqa: S606
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            self._environment | {NODE_LOSSES_VARIABLE: str(num_losses)},
        )


def _close_files_on_exec() -> None:
    for name in os.listdir(_OPEN_FILES) if _OPEN_FILES.exists() else ():
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # closed meanwhile

"""A template of worker processes: it has loaded what they run, and forks one whenever Ray starts a worker.

Each of Ray's workers would load Ray, PyTorch and a thousand modules anew: a second to three of a processor, and up to
250 MiB that no other process shares. The template is itself forked from `serve` when this has loaded Ray, and loads the
rest while `serve` goes on. Ray's node process runs `fork_worker.py` in the place of a worker, which asks here.

Nothing may run in the template but the one thread that forks: it starts no Ray, and computes nothing.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from alignedserve.config.environment import SHORT_SPINS, SPIN_VARIABLE
from alignedserve.process.heap import forget_pages_of_files
from alignedserve.runtime.device.devices import driver_version

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_WORKER = "ray._private.workers.default_worker"
_JOB_VARIABLE, _JOB = "RAY_JOB_ID", "01000000"  # the first one of a Ray that has just been started
_MAX_ORDER_BYTES = 4 << 20  # the system's limit of a command's words and environment is half of it
_ORDER_TIMEOUT_S = 5.0
_SETTLED_S = 5.0  # without an order, after which the cluster is up
_NUM_FILES = 3  # open ones of a process: what it reads, writes and complains to
_FORKED, _LISTEN = b"1", b"1"
# As Ray gives its workers: the engine sets the threads of its products by itself.
_THREADS = {"OMP_NUM_THREADS": "1", SPIN_VARIABLE: SHORT_SPINS}
_KILLED_FIRST = "1000"  # where memory is short: as Ray's node process has it of the workers that it starts itself


@dataclass(frozen=True, slots=True)
class TemplateLoads:
    """What a template loads, and when it begins to fork."""

    modules: Sequence[str]  # in this order
    num_early: int = 0  # workers forked early; they load the other modules themselves
    early_at: int = 0  # number of modules to load before the first early worker


class WorkerOrder(NamedTuple):
    """One worker that Ray wants."""

    folder: str
    words: list[str]  # of its command, after the interpreter
    environment: dict[str, str]

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read what fork_worker.py has written. Raises ValueError."""
        folder, count, *rest = map(os.fsdecode, text.split(b"\0"))
        number = int(count)
        if not 0 < number <= len(rest):
            raise ValueError("an order without a command")
        pairs = (variable.partition("=") for variable in rest[number:])
        return cls(folder, rest[:number], {name: value for name, _, value in pairs})


class WorkerTemplate:
    """Handle of the template, in the process that forked it. A context manager, at whose end it is killed."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid  # 0: it has been stopped
        self._control = control

    @classmethod
    def fork(cls, loads: TemplateLoads) -> Self | None:
        """Fork the template; None: not possible in this process or on this machine. Where NVIDIA's driver is, workers
        are started as Ray does it: nothing of CUDA may exist before a fork. So they are where Ray was loaded before."""
        is_alone = threading.active_count() == 1 and "ray" not in sys.modules
        if sys.platform != "linux" or not is_alone or driver_version() is not None:
            return None
        _load_ray()
        parent_end, control = socket.socketpair()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a handler would go on in both
        try:
            pid = os.fork()
            if pid == 0:
                parent_end.close()
                _run(control, loads)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        control.close()
        return cls(pid, parent_end)

    def listen(self, path: Path) -> bool:
        """Let the template listen for orders at this path, of a private folder. False: it has ended."""
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(os.fspath(path))
            listening.listen()
            try:
                socket.send_fds(self._control, [_LISTEN], [listening.fileno()])
            except OSError:
                return False
        return True

    def stop(self) -> None:
        """Kill the template; what it has forked lives on. May be repeated."""
        if self.pid:
            self._control.close()
            # A look after all children may have waited for the template, too.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _load_ray() -> None:
    """Load Ray as a worker does, which takes two things from the environment then, and not later. A worker ends with
    the process of that id: its node process, which here ends with the one that forks the template."""
    variables = {_JOB_VARIABLE: _JOB, "RAY_RAYLET_PID": str(os.getpid())}
    os.environ.update(variables)
    importlib.import_module("ray")
    for name in variables:
        del os.environ[name]


# --- in the template


def _run(control: socket.socket, loads: TemplateLoads) -> NoReturn:
    code = os.EX_SOFTWARE
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})  # as Ray's processes have it
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for a worker that has ended
        os.setpgid(0, 0)  # a signal to the group of `serve` is for that to heed
        sys.modules["ray._raylet"].setproctitle("alignedserve: template of workers")
        for name, value in _THREADS.items():
            os.environ.setdefault(name, value)
        orders = _Orders(control)
        for number, module in enumerate(loads.modules, start=1):
            importlib.import_module(module)
            if number >= loads.early_at:
                orders.take(loads.num_early, timeout_s=0.0)
        while orders.take(None, timeout_s=_SETTLED_S):
            pass
        forget_pages_of_files()  # which no worker gets from here: each finds them in the system's cache
        while True:
            orders.take(None, timeout_s=None)
    except _Ended:
        code = os.EX_OK
    finally:
        os._exit(code)  # whatever has failed: Ray's own way of starting workers tells


class _Ended(Exception): ...


class _Orders:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._listening: socket.socket | None = None
        self._num_taken = 0

    def take(self, most: int | None, timeout_s: float | None) -> bool:
        """Wait for an order or the end, at most this long (None: for ever), and obey all that wait. Raises _Ended.
        `most`: of all orders that were ever taken, for those that wait to be taken now. Returns whether there was
        any."""
        num_before = self._num_taken
        while most is None or self._num_taken < most:
            sources = [source for source in (self._control, self._listening) if source is not None]
            ready, _, _ = select.select(sources, [], [], timeout_s)
            if not ready:
                break
            if self._control in ready:
                self._obey()
            elif self._listening is not None:
                self._take_one(self._listening)
            timeout_s = 0.0
        return self._num_taken > num_before

    def _obey(self) -> None:
        said, files, _, _ = socket.recv_fds(self._control, len(_LISTEN), 1)
        if not said:
            raise _Ended
        self._listening = socket.socket(fileno=files[0])

    def _take_one(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        self._num_taken += 1
        files: list[int] = []
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_ORDER_TIMEOUT_S)
            _, files, _, _ = socket.recv_fds(connection, 1, _NUM_FILES)
            order = WorkerOrder.parse(_read_all(connection))
            if len(files) < _NUM_FILES or order.environment.get(_JOB_VARIABLE) != _JOB:
                raise ValueError("an order without its open files, or of another job")
            gc.freeze()  # a collection in a worker would write to every object, and so copy its page
            if os.fork() == 0:
                for channel in (self._control, listening, connection):
                    channel.close()
                _become_worker(order, files)
            connection.sendall(_FORKED)
        for file in files:
            os.close(file)


def _read_all(connection: socket.socket) -> bytes:
    text = bytearray()
    while part := connection.recv(1 << 16):
        text += part
        if len(text) > _MAX_ORDER_BYTES:
            raise ValueError("an order that is too long")
    return bytes(text)


# --- in a worker


def _become_worker(order: WorkerOrder, files: Sequence[int]) -> NoReturn:
    code: object = os.EX_SOFTWARE
    try:
        _settle_in(order, files)
        runpy.run_module(_WORKER, run_name="__main__", alter_sys=True)
        code = os.EX_OK
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  the outermost frame of a process
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own end would take every module apart, and copy all that is shared with the template.
        os._exit(code if isinstance(code, int) else int(code is not None))


def _settle_in(order: WorkerOrder, files: Sequence[int]) -> None:
    os.setpgid(0, 0)  # Ray's node process ends what is left of a worker by its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, encoding="ascii")
    sys.argv = order.words
    sys.modules["ray._raylet"].Config.initialize("")  # what Ray read at its import is read again
    gc.enable()

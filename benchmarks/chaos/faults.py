"""Faults of one process of a site, each for as long as its schedule says, and undone whatever happens."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread

from alignedserve.runtime.kv.arena_files import arena_folder
from benchmarks.chaos.room_process import when_true
from benchmarks.chaos.rooms import Rooms, fill
from benchmarks.chaos.schedules import ChaosFault, Hit, Target

_HOUR_S = 3600.0
_STARTS_S = 10.0  # a process that is missing is waited for
_CUT_AGAIN_S = 0.02
_FILL_AGAIN_S = 0.002
_STOPPED_S, _RUNNING_S = 0.04, 0.01  # of a slow process, in turn
_PIDFD_GETFD = 438  # Linux's system call, the same number on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


def inflict(site: Rooms, fault: ChaosFault) -> bool:
    if not when_true(lambda: site.pid(fault.target) is not None, _STARTS_S):
        return False
    with contextlib.suppress(ProcessLookupError), _FAULTS[fault.hit](site, fault.target) as is_there:
        time.sleep(fault.duration_s if is_there else 0.0)
        return is_there
    return True  # it ended meanwhile


def kill_and_wait(site: Rooms, target: Target) -> None:
    former = site.pid(target)
    with contextlib.suppress(ProcessLookupError), _killed(site, target):
        when_true(lambda: site.pid(target) not in (None, former), _STARTS_S, 0.005)


def _signalled(site: Rooms, target: Target, number: signal.Signals) -> int:
    pid = site.pid(target)
    if pid is None:
        raise ProcessLookupError
    os.kill(pid, number)
    return pid


@contextlib.contextmanager
def _killed(site: Rooms, target: Target) -> Iterator[bool]:
    _signalled(site, target, signal.SIGKILL)
    yield True


@contextlib.contextmanager
def _stopped(site: Rooms, target: Target) -> Iterator[bool]:
    pid = _signalled(site, target, signal.SIGSTOP)
    try:
        yield True
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _slow(site: Rooms, target: Target) -> Iterator[bool]:
    pid = site.pid(target)

    def turn() -> None:
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)

    with _repeated(turn, _RUNNING_S):
        yield True


@contextlib.contextmanager
def _cut(site: Rooms, target: Target) -> Iterator[bool]:
    pid, path = site.pid(target), site.socket_path(target)
    hidden = path.with_suffix(".hidden")
    with contextlib.suppress(FileNotFoundError):
        path.rename(hidden)
    try:
        if pid is None:
            raise ProcessLookupError
        with _repeated(lambda: shut_links(pid, site.run_folder), _CUT_AGAIN_S):
            yield True
    finally:
        if hidden.exists() and not path.exists():
            hidden.rename(path)
        hidden.unlink(missing_ok=True)


def shut_links(pid: int, folder: Path) -> int:
    """Shut down, both ways, the connected Unix sockets of another process whose address is in this folder.

    Returns how many. It needs the right to trace the process, as its parent has.
    """
    number = 0
    process_fd = os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            copied = _LIBC.syscall(_PIDFD_GETFD, process_fd, int(entry), 0)
            if copied >= 0:
                number += _shut(copied, str(folder))
    finally:
        os.close(process_fd)
    return number


def _shut(descriptor: int, folder: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as link:
        if link.family == socket.AF_UNIX and any(str(one).startswith(folder) for one in _ends_of(link)):
            link.shutdown(socket.SHUT_RDWR)
            return True
        return False
    with contextlib.suppress(OSError):  # no socket
        os.close(descriptor)
    return False


def _ends_of(link: socket.socket) -> tuple[object, object]:
    return link.getpeername(), link.getsockname()  # the first raises where nothing is connected


@contextlib.contextmanager
def _no_files(site: Rooms, target: Target) -> Iterator[bool]:
    pid = site.pid(target)
    if pid is None:
        raise ProcessLookupError
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))  # what is open stays open
    try:
        yield True
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _full(folder_of: Callable[[Rooms], Path]) -> Callable[[Rooms, Target], AbstractContextManager[bool]]:
    @contextlib.contextmanager
    def inflicted(site: Rooms, target: Target) -> Iterator[bool]:
        folder = folder_of(site)
        if not os.path.ismount(folder) or not site.has_small_disks:
            yield False
            return
        ballast = folder / f"ballast-{time.monotonic_ns()}"
        fill(ballast)
        try:
            _signalled(site, target, signal.SIGKILL)
            with _repeated(lambda: fill(ballast), _FILL_AGAIN_S):  # also what the process leaves, or removes
                yield True
        finally:
            ballast.unlink(missing_ok=True)

    return inflicted


def _clock(shift_s: float) -> Callable[[Rooms, Target], AbstractContextManager[bool]]:
    @contextlib.contextmanager
    def inflicted(site: Rooms, target: Target) -> Iterator[bool]:
        path = site.clock_path(target)
        path.write_text(str(shift_s))
        try:
            yield True
        finally:
            path.write_text("")

    return inflicted


@contextlib.contextmanager
def _repeated(turn: Callable[[], object], pause_s: float) -> Iterator[None]:
    is_over = Event()

    def run() -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            while not is_over.is_set():
                turn()
                is_over.wait(pause_s)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


_FAULTS: dict[Hit, Callable[[Rooms, Target], AbstractContextManager[bool]]] = {
    Hit.KILL: _killed,
    Hit.STOP: _stopped,
    Hit.LONG_STOP: _stopped,
    Hit.SLOW: _slow,
    Hit.CUT: _cut,
    Hit.STATE_FULL: _full(lambda site: site.state_folder),
    Hit.LOGS_FULL: _full(lambda site: site.log_folder),
    Hit.MEMORY_FULL: _full(lambda site: arena_folder()),
    Hit.NO_FILES: _no_files,
    Hit.CLOCK_FORWARD: _clock(_HOUR_S),
    Hit.CLOCK_BACK: _clock(-_HOUR_S),
}

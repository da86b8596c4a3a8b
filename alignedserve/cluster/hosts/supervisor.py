"""The supervisor of a cluster's driver, on the head: it outlives the shell that started it and restarts the driver.

It is no process of Ray's, so `ray stop` leaves it alone: it ends by itself when Ray has ended on this host. A user has
one supervisor per host: a new supervisor ends the former and takes over the lock.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from types import FrameType

import psutil

from alignedserve.cluster.run_folder import make_run_root
from alignedserve.config.environment import RAY_ADDRESS_VARIABLE, ray_address, run_root

LOG_NAME = "driver.log"
_LOCK_NAME = "supervisor.lock"
_MAX_LOG_BYTES = 1 << 20  # kept of former drivers
_POLL_S = 0.2
_STOP_S = 60.0  # for a driver to stop its cluster
_KILLED_S = 5.0  # for what was killed to be gone
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 15.0
_SETTLED_S = 120.0  # after which a driver has served, and its end is no failure to start
_MAX_FAILED_STARTS = 5
_RAY_LOOK_S = 3.0  # between looks whether Ray still runs here
_ABANDONED_S = 5.0  # for a driver to end after Ray has
_USAGE_ERROR = 2  # exit code of a configuration that will never start


def driver_log() -> Path:
    return run_root() / LOG_NAME


def start_supervisor(command: Sequence[str], ray_address: str) -> "subprocess.Popen[bytes]":
    """Start a supervisor of this command, which is to join the Ray at that address. Its process outlives this one. A
    former one is ended first. Raises ResourceError when others can enter the folder of its log."""
    root = make_run_root()
    end_supervisor()
    arguments = [sys.executable, "-m", "alignedserve.cluster.hosts.supervisor", *command]
    log_path = driver_log()
    if log_path.exists() and log_path.stat().st_size > _MAX_LOG_BYTES:
        log_path.unlink()
    environment = os.environ | {RAY_ADDRESS_VARIABLE: ray_address}
    with log_path.open("ab") as log:
        # Given absolute paths: it must not keep the folder of the shell in use.
        return subprocess.Popen(  # noqa: S603
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd=root,
        )


class SupervisorEnd(Enum):
    """The end that a supervisor came to."""

    NOT_THERE = auto()
    ENDED = auto()
    KILLED = auto()


def end_supervisor(*, leaves_s: float = 0.0, drain_s: float = 0.0, patience_s: float = _STOP_S) -> SupervisorEnd:
    """End the supervisor of this host, if there is one, with its driver; return how. `leaves_s`: in which it may end by
    itself. `drain_s`: in which its cluster may answer what is open; the driver is then told again, and ends at once.
    After `patience_s` more the two are killed: a driver may hang."""
    ending, began_s, is_told = SupervisorEnd.NOT_THERE, time.monotonic(), False
    while (pid := running_supervisor()) is not None:
        ending = SupervisorEnd.ENDED
        waited_s = time.monotonic() - began_s
        if waited_s > leaves_s + drain_s + patience_s:
            _kill(pid)
            return SupervisorEnd.KILLED
        if waited_s >= leaves_s + drain_s or (waited_s >= leaves_s and not is_told):
            is_told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(_POLL_S)
    return ending


def _kill(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(pid)
        supervisor.suspend()
        processes = [supervisor, *supervisor.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_KILLED_S)


def running_supervisor() -> int | None:
    path = run_root() / _LOCK_NAME
    try:
        with path.open("r+", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = path.read_text(encoding="ascii").strip()
        return int(text) if text.isdigit() else None
    return None


class Supervisor:
    """Runs one command until it ends by itself, is stopped, or Ray ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._is_stopping = False
        self._driver: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        pause_s, num_failed = _FIRST_PAUSE_S, 0
        while True:
            began_s = time.monotonic()
            code = self._run_driver()
            if code in (0, _USAGE_ERROR) or self._is_stopping:
                return code
            has_served = time.monotonic() - began_s > _SETTLED_S
            num_failed, pause_s = (0, _FIRST_PAUSE_S) if has_served else (num_failed + 1, pause_s)
            if num_failed >= _MAX_FAILED_STARTS or not has_raylet():
                print(f"The driver has ended with exit code {code} and is not started again.", flush=True)
                return code
            print(f"The driver has ended with exit code {code}; the next one starts in {pause_s:.0f} s.", flush=True)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            if self._is_stopping:
                return code

    def _run_driver(self) -> int:
        self._driver = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)  # noqa: S603
        if self._is_stopping:
            self._driver.terminate()
        asked_s: float | None = None  # since when it is to end, as Ray has ended
        look_s, has_ray = time.monotonic() + _RAY_LOOK_S, False
        while True:
            try:
                return self._driver.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if asked_s is not None and now - asked_s > _ABANDONED_S:
                self._driver.kill()  # it waits for an answer from Ray that will not come
            elif asked_s is None and now > look_s:
                look_s = now + _RAY_LOOK_S
                had_ray, has_ray = has_ray, has_raylet()
                if had_ray and not has_ray:
                    asked_s = now
                    self._driver.terminate()

    def _pause(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and not self._is_stopping:
            time.sleep(_POLL_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()


def has_raylet() -> bool:
    port = (ray_address() or "").rpartition(":")[2]
    return any(
        process.info["name"] == "raylet"
        and process.info["uids"].real == os.getuid()
        and (not port.isdigit() or _is_of_head(process.info["cmdline"] or (), port))
        for process in psutil.process_iter(["name", "uids", "cmdline"])
        if process.info["uids"] is not None
    )


def _is_of_head(command_line: Sequence[str], port: str) -> bool:
    return any(word.startswith("--gcs-address=") and word.endswith(f":{port}") for word in command_line)


def main(command: Sequence[str]) -> int:
    with (run_root() / _LOCK_NAME).open("a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another supervisor runs on this host.", flush=True)
            return 1
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        return Supervisor(command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

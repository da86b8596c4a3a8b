"""`alignedserve serve` as something that can be hit: its processes by role, signals to them, and its restart."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measuring.kill_schedules import Hit, KillFault, Target
from benchmarks.measuring.server import ALIGNEDSERVE, free_port, wait_ready

_ENDS_BY_ITSELF_S = 15.0
_FIND_S = 20.0
SEPARATE = ("--set", "topology=disaggregated")  # with every kind of process to hurt
_TITLES = {
    Target.GATEWAY: ("ray::GatewayActor",),
    Target.DRIVER: ("ray::BatchActor",),
    Target.ROUTER: ("ray::RouterActor",),
    Target.PREFILL: ("ray::PrefillWorkerActor",),
    Target.DECODE: ("ray::DecodeWorkerActor", "ray::ColocatedWorkerActor"),
    Target.POOL: ("ray::KvPoolActor",),
}


class KillCluster:
    """One cluster on its own port, with its own folders under `folder`. `start`, hit it, `stop`."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.num_starts = 0
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None, "asked before it was started"
        return self._process.pid

    def start(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ALIGNEDSERVE"))}
        folders = {"ALIGNEDSERVE_RUN_DIR": self.folder / "run", "ALIGNEDSERVE_STATE_DIR": self.folder / "state"}
        with (self.folder / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                [ALIGNEDSERVE, "serve", "--port", str(self.port), *self._options],
                env=inherited | {name: str(path) for name, path in folders.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.num_starts += 1
        wait_ready(self.port)
        self._note()

    def stop(self) -> None:
        self._note()
        process = self._process
        assert process is not None, "stopped before it was started"
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        self._kill(self._alive())

    def hit(self, fault: KillFault) -> bool:
        """Inject a fault, and restore the cluster where it cannot do so itself. False: there was no such process."""
        victims = self._victims(fault.target)
        if not victims:
            return False
        if fault.hit is Hit.STOP:
            self._signal(victims, signal.SIGSTOP)
            time.sleep(fault.stopped_s)
            self._signal(victims, signal.SIGCONT)
            return True
        self._kill(victims)
        if fault.target in (Target.ALL, Target.COMMAND):
            self._restart()
        return True

    def _restart(self) -> None:
        assert self._process is not None, "restarted before it was started"
        self._process.wait()
        psutil.wait_procs([one for one in self._alive() if _is_ours(one)], timeout=_ENDS_BY_ITSELF_S)
        survivors = [_title(one) for one in self._alive() if _is_ours(one)]
        assert not survivors, f"outlived the command: {survivors}"
        self.start()

    def processes(self, target: Target) -> list[psutil.Process]:
        self._note()
        return [one for one in self._alive() if _title(one).startswith(_TITLES[target])]

    def _victims(self, target: Target) -> list[psutil.Process]:
        assert self._process is not None, "hit before it was started"
        if target is Target.COMMAND:
            self._note()
            return [psutil.Process(self._process.pid)]
        if target is Target.ALL:
            self._note()
            return self._alive()
        deadline_s = time.monotonic() + _FIND_S
        while not (found := self.processes(target)) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # it is being started again
        return found[-1:]

    def _note(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            self._known |= {one.pid: one for one in (own, *own.children(recursive=True))}

    def _alive(self) -> list[psutil.Process]:
        alive = []
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    @staticmethod
    def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _kill(self, processes: list[psutil.Process]) -> None:
        self._signal(processes, signal.SIGKILL)
        if self._process is not None and any(one.pid == self._process.pid for one in processes):
            self._process.wait()
        psutil.wait_procs(processes, timeout=5.0)


@contextlib.contextmanager
def kill_cluster(folder: Path, options: tuple[str, ...] = SEPARATE) -> Iterator[KillCluster]:
    cluster = KillCluster(folder, options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        command = process.cmdline()
        return command[0] if command else ""
    return ""


def _is_ours(process: psutil.Process) -> bool:
    title = _title(process)
    return title.startswith("ray::") and "Actor" in title

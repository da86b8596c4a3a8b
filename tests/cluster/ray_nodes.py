"""Ray nodes on this host and `alignedserve up` on them: as hosts, for losses that need no network of their own."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from alignedserve.cluster.hosts.ray_directory import ray_storage, waiting_for_head
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from tests.cluster.serving import COMMAND
from tests.cluster.warm_command import WarmCommand
from tests.support.ports import free_port

RAY = (sys.executable, "-m", "ray.scripts.scripts")
_START_S = 180.0
_UP_S = 480.0
_POLL_S = 0.1
_STATUS_POLL_S = 0.5  # as a command takes half a second of a core
_KILLED = "--- killed\n"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024


class RayNodes:
    """Nodes by number, the head first; their processes are the descendants of one command each."""

    def __init__(self, folder: Path, redis_url: str | None = None) -> None:
        """`folder`: with a short path, as it gets sockets. `redis_url`: for the state of Ray and of batches."""
        self.folder = folder
        self.run_dir = folder / "run"
        self._port = free_port()
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ALIGNEDSERVE"))}
        self.environment = inherited | RAY_ENVIRONMENT
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.environment |= {"RAY_ADDRESS": f"127.0.0.1:{self._port}"}
        self.environment |= {"ALIGNEDSERVE_RUN_DIR": str(self.run_dir), "ALIGNEDSERVE_STATE_DIR": str(folder / "state")}
        self.environment |= waiting_for_head(redis_url)
        self._storage = ray_storage(redis_url, "tests")
        if redis_url:
            self.environment["ALIGNEDSERVE_REDIS_URL"] = redis_url
        self._commands = contextlib.ExitStack()
        self._asking: WarmCommand | None = None

    # --- Ray

    def start(self, index: int, num_tries: int = 3) -> None:
        """Start a node and wait until it is up."""
        common = (f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats", "--num-cpus=1", "--block")
        at = ("--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self.folder / 'ray'}")
        of_head = (*at, *self._storage.options)
        # Another address of the head than its own: beside processes that name that one no new head would start.
        joining = (f"--address=127.0.0.2:{self._port}",)
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        with (self.folder / f"ray-{index}.log").open("ab") as log:
            self._nodes[index] = subprocess.Popen(
                [*RAY, "start", *(joining if index else of_head), *common],
                env=environment | ({} if index else self._storage.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        path = self.folder / f"ray-{index}.log"

        def said() -> str:
            return path.read_text().rpartition(_KILLED)[2]

        self.wait(lambda: "Ray runtime started." in said() or self._nodes[index].poll() is not None, said)
        if self._nodes[index].poll() is not None:  # on a busy machine it gives up after 30 s
            assert num_tries > 1, said()
            self.kill(index)
            self.start(index, num_tries - 1)

    def processes(self, index: int) -> list[psutil.Process]:
        """Return all of a node, the actors on it included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._nodes[index].pid)
            return [*own.children(recursive=True), own]
        return []

    def kill(self, index: int) -> None:
        """Kill a node at once with all that runs there, as when its host is lost."""
        found = self.processes(index)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=10.0)
        self._nodes.pop(index).wait()
        with (self.folder / f"ray-{index}.log").open("a") as log:
            log.write(_KILLED)

    def process(self, index: int, name: str) -> psutil.Process:
        """Return the process of a node with this name, such as gcs_server."""
        return next(one for one in self.processes(index) if one.name() == name)

    # --- the cluster on it

    def command(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run `alignedserve` to its end."""
        return subprocess.run(
            [COMMAND, *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start_and_up(self, *options: str) -> None:
        """Start two nodes and the cluster, which waits for the second."""
        self.start(0)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(self.start, 1)
            self.up("--nodes", "2", *options)
            second.result()

    def up(self, *options: str) -> float:
        """Start the cluster, or go on with it; return the seconds until it answered."""
        began_s = time.monotonic()
        done = self.command("up", *options, timeout_s=_UP_S)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.driver_log()}"
        return time.monotonic() - began_s

    def status(self) -> dict[str, Any]:
        """Return what `status` says; empty while it says nothing."""
        if self._asking is None:
            self._asking = self._commands.enter_context(WarmCommand(self.folder, "cluster.hosts", self.environment))
        output = self._asking.run(("status", "--json"), self.environment).stdout
        return dict(json.loads(output[output.index("{") : output.rindex("}") + 1])) if "{" in output else {}

    def urls(self) -> list[str]:
        """Return the gateways' addresses, the head's first."""
        return [url for node in self.status()["nodes"] for url in node["urls"]]

    def supervisor(self) -> psutil.Process:
        """Return the driver's supervisor."""
        return psutil.Process(int((self.run_dir / "supervisor.lock").read_text()))

    def is_supervised(self) -> bool:
        """Return whether there is a supervisor."""
        with contextlib.suppress(psutil.NoSuchProcess, OSError, ValueError):
            return self.supervisor().status() != psutil.STATUS_ZOMBIE
        return False

    def driver(self) -> psutil.Process:
        """Return the driver."""
        return self.supervisor().children()[0]

    def driver_log(self) -> str:
        """Return what drivers have written."""
        path = self.run_dir / "driver.log"
        return path.read_text() if path.exists() else ""

    def wait(self, holds: Callable[[], bool], seen: Callable[[], object], timeout_s: float = _START_S) -> float:
        """Wait until something holds; return the seconds that it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < timeout_s, seen()
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def wait_for_status(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the status is as wanted; return it."""
        ends_s = time.monotonic() + _START_S
        while not holds(found := self.status()):
            assert time.monotonic() < ends_s, f"{found}\n{self.driver_log()}"
            time.sleep(_STATUS_POLL_S)
        return found

    # --- the end

    def leftovers(self) -> list[str]:
        """Return sockets and shared memory of the cluster, and actors on the nodes."""
        names = [path.name for path in self.run_dir.glob("*") if path.is_dir()]
        arenas = [path for name in names for path in Path("/dev/shm").glob(f"alignedserve-{name}-*")]
        return [*map(str, (*self.run_dir.glob("*/*.sock"), *arenas)), *self.actors().values()]

    def actors(self) -> dict[int, str]:
        """Return the actors' process ids and titles, agents included."""
        found = {}
        for process in (one for index in self._nodes for one in self.processes(index)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = "".join(process.cmdline()[:1])
                if title.startswith("ray::") and ("Actor" in title or "NodeAgent" in title):
                    found[process.pid] = title
        return found

    def end(self) -> None:
        """End everything, whatever a test did."""
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            supervisor = self.supervisor()
            for process in (supervisor, *supervisor.children()):
                process.send_signal(signal.SIGKILL)
        for index in sorted(self._nodes, reverse=True):
            self.kill(index)
        self._commands.close()

"""`alignedserve serve` as a process of its own, seen from outside: started, asked, hurt, stopped, and looked behind."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from alignedserve.runtime.model.named_models import pocket_folder
from tests.support.ports import free_port

COMMAND = Path(sys.executable).parent / "alignedserve"
MODEL = "model"  # the name under which it is served
READY_TIMEOUT_S = 240.0  # on a machine that others keep busy; 10 s on an idle one
_POLL_S = 0.05
# Two seconds of calibration at every start of a worker are too many. In float32 answers do not depend on the batch.
_QUICK = ("--set", "engine.calibration_s=0.2", "--set", "model.dtype=float32")
_SHARED_MEMORY = Path("/dev/shm")

# In float32 a token is the same whichever requests share its batch, and whether its context was decoded or computed
# again; in bfloat16, the default on some processors, it need not be.
FLOAT32 = ("--set", "model.dtype=float32")
EXACT = ("--set", "model.random_weights=true", *FLOAT32)


def write_random_model(folder: Path) -> Path:
    """A folder with the shipped model's config and tokenizer, to be served with random weights: nothing to load, and
    answers that differ from token to token."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_folder() / name, folder / name)
    return folder


class Serving:
    """One `alignedserve serve`. `run_dir` gets its sockets and logs; `options` follow `serve` on the command line."""

    def __init__(self, run_dir: Path, options: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_dir = run_dir
        self._known: dict[int, psutil.Process] = {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ALIGNEDSERVE"))}
        self._process = subprocess.Popen(
            [COMMAND, "serve", "--port", str(self.port), *_QUICK, *options],
            env=inherited
            | {"ALIGNEDSERVE_RUN_DIR": str(run_dir), "ALIGNEDSERVE_STATE_DIR": str(run_dir.parent / "state")}
            | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Return the process id of the command itself."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return True until the command has ended."""
        return self._process.poll() is None

    # --- asking

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Wait until /ready says so, and return the seconds that it took."""
        began_s = time.monotonic()
        while self.get("/ready")[0] != 200:
            self.note_processes()
            assert self.is_running(), f"serve ended: {self.finish()}"
            assert time.monotonic() - began_s < timeout_s, f"not ready: {self.get('/ready')}\n{self.logs()}"
            time.sleep(_POLL_S)
        self.note_processes()
        return time.monotonic() - began_s

    def wait_unready(self) -> None:
        """Wait until the gateway knows of a loss: /ready says something else, or there is no answer."""
        while self.get("/ready")[0] == 200:
            time.sleep(_POLL_S)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 without an answer."""
        return self._ask(urllib.request.Request(self.url + path))

    def complete(self, prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 4, **fields: object) -> tuple[int, Any]:
        """Return one answer, whole; status 0 without an answer."""
        return self._generate("/v1/completions", {"prompt": list(prompt), "max_tokens": max_tokens, **fields})

    def chat(self, question: str, max_tokens: int = 4, **fields: object) -> tuple[int, Any]:
        """Return the answer to one message, whole; status 0 without an answer."""
        messages = [{"role": "user", "content": question}]
        return self._generate("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens, **fields})

    def _generate(self, path: str, fields: dict[str, object]) -> tuple[int, Any]:
        body = json.dumps({"model": MODEL, "temperature": 0, **fields}).encode()
        request = urllib.request.Request(
            self.url + path, body, {"content-type": "application/json", "connection": "close"}
        )
        status, text = self._ask(request, timeout_s=120.0)
        return status, json.loads(text) if text else None

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics, without labels; empty while there is no answer."""
        status, text = self.get("/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, value in lines} if status == 200 else {}

    def wait_for(self, name: str, holds: Callable[[float], bool], timeout_s: float = 60.0) -> None:
        """Wait until this metric is such; the router's reports, where most come from, are up to a second old."""
        began_s = time.monotonic()
        while not holds(self.metrics().get(name, float("nan"))):
            assert time.monotonic() - began_s < timeout_s, self.metrics()
            time.sleep(_POLL_S)

    def wait_idle(self, timeout_s: float = 60.0) -> float:
        """Wait until no block is in use anywhere, and return the seconds that it took."""
        began_s = time.monotonic()
        while not self._is_idle(metrics := self.metrics()):
            held = {name: value for name, value in metrics.items() if value and "bucket" not in name}
            assert time.monotonic() - began_s < timeout_s, f"still held: {held}\n{self.logs()}"
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    @staticmethod
    def _is_idle(metrics: dict[str, float]) -> bool:
        zeros = (
            "alignedserve_pool_blocks_used",
            "alignedserve_worker_blocks_used",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        )
        return all(metrics.get(name) == 0 for name in zeros)

    @staticmethod
    def _ask(request: urllib.request.Request, timeout_s: float = 10.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, urllib.error.URLError):
            return 0, ""

    # --- processes

    def note_processes(self) -> None:
        """Remember every process that belongs to this cluster now, so that `leftovers` can look for it later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            for process in (*own.children(recursive=True), own):
                self._known[process.pid] = process

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return the processes of the actors whose class begins with this, such as DecodeWorker."""
        self.note_processes()
        found = []
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = process.cmdline()[:1]
                if title and title[0].startswith("ray::") and f"{kind}Actor" in title[0]:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def ray_process(self, name: str) -> psutil.Process:
        """Return Ray's own process of this name: raylet or gcs_server."""
        self.note_processes()
        (found,) = (one for one in psutil.Process(self.pid).children() if one.name() == name)
        return found

    def process_names(self) -> list[str]:
        """Return the first words of the command lines of everything that runs."""
        names = []
        for process in self._running():
            with contextlib.suppress(psutil.NoSuchProcess):
                names += process.cmdline()[:1]
        return names

    def actor(self, kind: str) -> psutil.Process:
        """Return the oldest of them."""
        return self.actors(kind)[0]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, as a terminal or a supervisor would."""
        self.note_processes()
        self._process.send_signal(number)

    def finish(self, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        out, err = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, out, err

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Signal the command and wait for its end."""
        self.send_signal(number)
        return self.finish(timeout_s)

    def end(self) -> None:
        """Make sure that nothing of it runs on, whatever a test did."""
        if self.is_running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(timeout_s=30.0)
        for process in (psutil.Process(self.pid), *self._running()) if self.is_running() else self._running():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in self.arenas():
            path.unlink(missing_ok=True)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    # --- what is left

    def leftovers(self, patience_s: float = 15.0, besides: str | None = None) -> list[str]:
        """Return processes, sockets and shared memory that outlive the command, after a moment to settle.

        `besides`: processes whose first words end so are none.
        """
        ends_s = time.monotonic() + patience_s
        while (left := self._left_processes(besides)) and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        processes = [f"{process_id}: {words}" for process_id, words in left.items()]
        files = [str(path) for path in (*self.run_dir.glob("*/*.sock"), *self.arenas())]
        return processes + files

    def arenas(self) -> list[Path]:
        """Return the cluster's files in shared memory."""
        clusters = [path.name for path in self.run_dir.glob("*") if path.is_dir()]
        return [path for name in clusters for path in _SHARED_MEMORY.glob(f"alignedserve-{name}-*")]

    def logs(self) -> str:
        """Return the end of every actor's log."""
        paths = sorted(self.run_dir.glob("*/logs/*.log"))
        return "\n".join(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths)

    def _left_processes(self, besides: str | None) -> dict[int, list[str]]:
        found = {}
        for process in self._running():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()[:3]
                if besides is None or not "".join(words[:1]).endswith(besides):
                    found[process.pid] = words
        return found

    def _running(self) -> list[psutil.Process]:
        alive = []
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != self.pid and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


@contextlib.contextmanager
def serving(run_dir: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Serving]:
    """Start a cluster, and end it whatever happens. It is not waited for: see `wait_ready`."""
    run_dir.mkdir(mode=0o700, exist_ok=True)
    cluster = Serving(run_dir, options, environment)
    try:
        yield cluster
    finally:
        cluster.end()


def token_prompts(count: int, seed: int = 0, max_len: int = 200) -> list[list[int]]:
    """Return different prompts of different lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(rng.randrange(1, max_len))] for _ in range(count)]

"""Time from the command to a cluster that is ready and to a whole answer, and what it takes while it is idle.

python -m benchmarks.cluster.startup  # targets on two cores: ready in 6 s, SmolLM2 in 9 s; at most 0.8 GiB idle

Of each start: seconds from the command to its phases, processor seconds of every process until /ready, and memory once
idle. On a machine that others use, seconds tell little.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import threading
import time
import urllib.request
from typing import Any, NamedTuple

import psutil
from typing_extensions import override

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import ALIGNEDSERVE, READY_TIMEOUT_S, free_port, wait_ready

_IDLE_S = 5.0
_LOOK_S = 0.1
_LONG_QUESTION = "The capital of France is Paris, and that of Italy is Rome. "
_NUM_TIMES = {"pocket": 20, "disaggregated": 20, "smollm2": 60}  # as contexts allow: of SmolLM2 900 tokens
_PHASES = {"gcs_server": "Ray's head has begun", "python default_worker.py": "the first worker process has begun"}
CASES = {
    "pocket": ["pocket"],  # as `make serve`: elastic
    "disaggregated": ["pocket", "--set", "topology=disaggregated"],
    "smollm2": ["smollm2"],  # as `make serve MODEL=smollm2`
}


class Start(NamedTuple):
    """Seconds from the command, and memory once idle, by process."""

    ready_s: float
    answered_s: float
    answer: str
    memory: dict[str, int]
    memory_later: dict[str, int]  # once idle again after a long prompt
    phases: dict[str, float]  # seconds from the command to what is first seen then
    used_s: dict[str, float]  # processor seconds until ready, by process


class Observer(threading.Thread):
    """Looks at the processes of a start until it is told to end."""

    def __init__(self, root: psutil.Process, began_s: float) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._began_s = began_s
        self._used: dict[int, tuple[str, float]] = {}
        self._is_over = threading.Event()
        self.phases: dict[str, float] = {}

    @override
    def run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    self._look(process)

    def end(self) -> dict[str, float]:
        """Stop looking; return the processor seconds of every process."""
        self._is_over.set()
        self.join()
        used: dict[str, float] = {}
        for name, seconds in self._used.values():
            used[name] = round(used.get(name, 0.0) + seconds, 2)
        return used

    def _look(self, process: psutil.Process) -> None:
        name, times = name_of(process), process.cpu_times()
        self._used[process.pid] = (name, times.user + times.system)
        if name in _PHASES or (name.startswith("ray::") and name.endswith("Actor")):
            self.phases.setdefault(_PHASES.get(name, f"{name} is up"), round(time.monotonic() - self._began_s, 2))


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    words = [word.rpartition("/")[2] for word in command if not word.startswith("-")]
    return " ".join(words[: 2 if words[0].startswith("python") else 1]) if words else process.name()


def ask(port: int, question: str = "What is the capital of France?") -> str:
    message = {"role": "user", "content": question}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as listed:
        model = json.load(listed)["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "messages": [message], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def memory_bytes(root: psutil.Process) -> dict[str, int]:
    """Return the proportional set size of every process of the cluster, by what it is.

    Shared pages are counted once.
    """
    sizes: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            command = name_of(process)
            sizes[command] = sizes.get(command, 0) + process.memory_full_info().pss
        except psutil.Error:
            continue
    return sizes


def measure(arguments: list[str], num_times: int) -> Start:
    port = free_port()
    command = [ALIGNEDSERVE, "serve", *arguments, "--port", str(port)]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    observer = Observer(psutil.Process(process.pid), began_s)
    observer.start()
    try:
        wait_ready(port)
        ready_s = time.monotonic() - began_s
        used_s = observer.end()
        answer = ask(port)
        answered_s = time.monotonic() - began_s
        time.sleep(_IDLE_S)
        memory = memory_bytes(psutil.Process(process.pid))
        ask(port, _LONG_QUESTION * num_times)
        time.sleep(_IDLE_S)
        later = memory_bytes(psutil.Process(process.pid))
        return Start(ready_s, answered_s, answer, memory, later, observer.phases, used_s)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def figures_of(starts: list[Start]) -> dict[str, Any]:
    total, later = (
        [sum(memory.values()) / 2**20 for memory in memories]
        for memories in zip(*((start.memory, start.memory_later) for start in starts), strict=True)
    )
    return {
        "ready_s": [round(start.ready_s, 1) for start in starts],
        "ready_s_median": round(statistics.median(start.ready_s for start in starts), 1),
        "answered_s": [round(start.answered_s, 1) for start in starts],
        "answered_s_median": round(statistics.median(start.answered_s for start in starts), 1),
        "answer": starts[-1].answer,
        "phases_s": starts[-1].phases,
        "used_s": [round(sum(start.used_s.values()), 1) for start in starts],
        "used_s_median": round(statistics.median(sum(start.used_s.values()) for start in starts), 1),
        "used_s_by_process": starts[-1].used_s,
        "idle_pss_mib_median": round(statistics.median(total)),
        "idle_pss_mib_by_process": {key: round(size / 2**20) for key, size in sorted(starts[-1].memory.items())},
        "pss_mib_after_a_long_prompt_median": round(statistics.median(later)),
        "pss_mib_after_a_long_prompt_of_workers": round(
            sum(size for key, size in starts[-1].memory_later.items() if "Worker" in key) / 2**20
        ),
    }


def main() -> None:
    """Measure several starts of each case; print and record."""
    parser = parser_of(__doc__, rounds=3, name="serving/startup")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.only:
        figures[name] = figures_of([measure(CASES[name], _NUM_TIMES[name]) for _ in range(options.rounds)])
        print(name, figures[name])
        write_result(options.name, figures)


if __name__ == "__main__":
    main()

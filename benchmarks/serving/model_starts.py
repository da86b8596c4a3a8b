"""Starts of models of 135M to 8B parameters with no option: what is chosen, time to ready, memory, one stream.

    python -m benchmarks.serving.model_starts [--shape llama-135m qwen2-0.5b ...] [--folder /tmp/models]

Random weights in bfloat16, in folders as a hub has them (written on the first call, 2 bytes per parameter; the 8B one
needs 16 GB of disk, and 24 GB of memory to start). A start is `alignedserve serve FOLDER`; when it is ready one chat,
then one streamed completion. Memory is the proportional set size of all processes, read a few times a second: pages
that several share count once, and pages of the files that are mapped count too.
"""

import argparse
import json
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import override

from benchmarks.serving.startup import free_port
from benchmarks.support.command import ALIGNEDSERVE
from benchmarks.support.model_folders import FOLDER_SHAPES, make_model_folder
from benchmarks.support.recording import RESULTS, write_result

NUM_TOKENS = {"llama-8b": 16}  # of an answer; else _NUM_TOKENS
_NUM_TOKENS = 64
_PROMPT = "Once upon a time there was a machine with two cores and little memory. "
_ANSWER_TIMEOUT_S = 600.0
_BETWEEN_S = 0.3  # looks at the memory


class MemoryWatch(threading.Thread):
    """Keeps the highest memory of a process and its children, and the least that the system had available."""

    def __init__(self, root: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._is_over = threading.Event()
        self.available_before = self.least_available = psutil.virtual_memory().available
        self.peak_bytes = self.last_bytes = 0
        self._peaks: dict[int, tuple[str, int]] = {}

    @override
    def run(self) -> None:
        """Look until it is over."""
        while not self._is_over.wait(_BETWEEN_S):
            sizes = list(_sizes(self._root))
            self.last_bytes = sum(size for _, _, size in sizes)
            self.peak_bytes = max(self.peak_bytes, self.last_bytes)
            self.least_available = min(self.least_available, psutil.virtual_memory().available)
            for pid, name, size in sizes:
                peak = max(self._peaks.get(pid, ("", 0))[1], size)
                self._peaks[pid] = (name, peak)  # a Ray actor gets its name after its start

    def peaks_mib(self) -> dict[str, int]:
        """Return the highest memory of each large process."""
        return {name: round(size / 2**20) for name, size in sorted(self._peaks.values()) if size > 2**26}

    def stop(self) -> None:
        """End looking."""
        self._is_over.set()
        self.join()


def _sizes(root: psutil.Process) -> Iterator[tuple[int, str, int]]:
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            name = process.name()
            title = process.cmdline()[0] if name.startswith("ray::") else name
            yield process.pid, title.split(".")[0], _proportional_bytes(process.pid)
        except (psutil.Error, OSError, IndexError):
            continue


def _proportional_bytes(pid: int) -> int:
    """Return the proportional set size, from the kernel's own sum: reading every mapping takes far longer."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


@contextmanager
def started(folder: Path, notes: Path, deadline_s: float) -> Iterator[tuple[int, float, MemoryWatch]]:
    """Serve the folder without an option, its stderr to `notes`; give its port, seconds to ready and its memory."""
    port = free_port()
    began_s = time.monotonic()
    with notes.open("w") as stderr:
        command = [ALIGNEDSERVE, "serve", str(folder), "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    watch = MemoryWatch(psutil.Process(process.pid))
    watch.start()
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() - began_s > deadline_s:
                raise RuntimeError(f"it did not start:\n{notes.read_text()}")
            time.sleep(0.1)
        yield port, time.monotonic() - began_s, watch
    finally:
        watch.stop()
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _post(port: int, path: str, body: dict[str, Any]) -> Any:
    url = f"http://127.0.0.1:{port}/v1/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S)


def chat(port: int, model: str) -> int:
    """Ask one question and return the tokens of its answer."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with _post(port, "chat/completions", {"model": model, "messages": messages, "max_tokens": 8}) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def stream(port: int, model: str, num_tokens: int) -> dict[str, float]:
    """Stream one completion; return its time to the first token, and tokens per second after it."""
    body = {"model": model, "prompt": _PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    began_s, times = time.monotonic(), []
    with _post(port, "completions", {**body, "temperature": 0}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times += [time.monotonic()] * (json.loads(line[6:])["choices"][0]["text"] != "")
    if len(times) < num_tokens // 2:
        raise RuntimeError(f"{len(times)} texts of {num_tokens} tokens came")
    return {
        "ttft_s": round(times[0] - began_s, 2),
        "tokens_per_s": round((num_tokens - 1) / (times[-1] - times[0]), 2),
    }


def measure(name: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Start one shape, ask it, stop it; return the figures."""
    make_model_folder(folder, FOLDER_SHAPES[name])
    notes = Path(tempfile.gettempdir()) / f"model_starts_{name}.txt"
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with started(folder, notes, deadline_s) as (port, ready_s, watch):
        loading_bytes = watch.peak_bytes
        chat_tokens = chat(port, folder.name)
        streamed = stream(port, folder.name, NUM_TOKENS.get(name, _NUM_TOKENS))
        time.sleep(1.0)
        return {
            "file_mib": round(file_bytes / 2**20),
            "lines": notes.read_text().splitlines(),
            "ready_s": round(ready_s, 1),
            "chat_tokens": chat_tokens,
            **streamed,
            "peak_pss_mib": round(watch.peak_bytes / 2**20),
            "peak_pss_until_ready_mib": round(loading_bytes / 2**20),
            "last_pss_mib": round(watch.last_bytes / 2**20),
            "peak_pss_by_process_mib": watch.peaks_mib(),
            "available_before_mib": round(watch.available_before / 2**20),
            "least_available_mib": round(watch.least_available / 2**20),
        }


def main() -> None:
    """Start each shape; print and record, beside the figures of shapes that are not started now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(FOLDER_SHAPES), choices=FOLDER_SHAPES)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "alignedserve-models")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds to ready")
    arguments = parser.parse_args()
    path = RESULTS / "model_starts.json"
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    for name in arguments.shape:
        figures[name] = measure(name, arguments.folder / name, arguments.deadline)
        print(name, json.dumps(figures[name], indent=1), flush=True)
        write_result("model_starts", figures)


if __name__ == "__main__":
    main()

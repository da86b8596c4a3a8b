"""Loading of weights against a plain read of their files into memory: the same threads, the page cache warm.

    python -m benchmarks.engine.loading [--shape llama-8b-quarter] [--folder /tmp/models] [--rounds 5]

Random weights in bfloat16; an 8B shape with a quarter of its layers, so that files and packed weights both fit in
memory. Loads and reads alternate in one process, and medians count; the first of each fills the page cache, and its
memory is watched. The plain read goes into new memory by large pieces, on huge pages (as packed weights are) and on
ordinary ones. Memory is what the process has beyond what it had before (proportional set size, read every few
milliseconds), by the bytes of the weights as they are held.
Targets: the time of the read on huge pages, and 1.15 times the weights.
"""

import argparse
import gc
import json
import mmap
import os
import re
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_files import load_weights
from benchmarks.support.model_folders import FOLDER_SHAPES, make_model_folder
from benchmarks.support.recording import write_result

QUARTER = "llama-8b-quarter"
SHAPES = {**FOLDER_SHAPES, QUARTER: FOLDER_SHAPES["llama-8b"]._replace(num_layers=8)}
LOAD, READ, READ_ORDINARY = "load", "read", "read_ordinary_pages"
_PIECE_BYTES = 16 << 20
_BETWEEN_S = 0.005  # looks at the memory
_HUGE_PAGE = 2 << 20


class _Peak(threading.Thread):
    """The highest memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = threading.Event()
        self.highest = self.before = _proportional_bytes()

    @override
    def run(self) -> None:
        while not self._is_over.wait(_BETWEEN_S):
            self.highest = max(self.highest, _proportional_bytes())

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        return max(self.highest, _proportional_bytes()) - self.before


def _proportional_bytes() -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def read_files(folder: Path, num_threads: int, *, wants_huge_pages: bool) -> list[mmap.mmap]:
    """Read all weight files into new memory."""
    filled = []
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if wants_huge_pages else mmap.MADV_NOHUGEPAGE)
        _read_file(path, memoryview(memory)[:size], num_threads)
        filled.append(memory)
    return filled


def _read_file(path: Path, memory: memoryview, num_threads: int) -> None:
    with path.open("rb") as file, ThreadPoolExecutor(num_threads) as threads:

        def read(begin: int) -> None:
            piece = memory[begin : begin + _PIECE_BYTES]
            while piece:
                got = os.preadv(file.fileno(), [piece], begin)
                begin, piece = begin + got, piece[got:]

        list(threads.map(read, range(0, len(memory), _PIECE_BYTES)))


def run_one(what: str, folder: Path, num_threads: int, *, watches_memory: bool) -> dict[str, float]:
    """Load or read, and forget it again; return seconds, processor seconds and, if watched, memory."""
    peak = _Peak()
    if watches_memory:
        peak.start()
    began_s, cpu_s = time.perf_counter(), sum(os.times()[:2])
    kept: Any
    if what == LOAD:
        kept = load_weights(folder, read_model_config(folder), torch.bfloat16)
    else:
        kept = read_files(folder, num_threads, wants_huge_pages=what == READ)
    seconds, used_s = time.perf_counter() - began_s, sum(os.times()[:2]) - cpu_s
    memory = peak.stop() if watches_memory else 0
    del kept
    gc.collect()
    return {"s": seconds, "cpu_s": used_s, "memory_bytes": memory}


def measure(folder: Path, num_threads: int, rounds: int) -> dict[str, Any]:
    """Alternate loads and reads; return medians."""
    runs: dict[str, list[dict[str, float]]] = {LOAD: [], READ: [], READ_ORDINARY: []}
    peaks = dict.fromkeys(runs, 0.0)
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    weight_bytes = read_model_config(folder).loaded_weight_bytes("bfloat16")
    torch.set_num_threads(num_threads)
    # Loads and reads take turns strictly, as each gets the pages that the other has left, which a hypervisor may have
    # taken back meanwhile; ordinary pages come apart from them.
    order = [(index, what) for index in range(rounds + 1) for what in (LOAD, READ)]
    order += [(index, READ_ORDINARY) for index in range(rounds + 1)]
    for index, what in order:
        run = run_one(what, folder, num_threads, watches_memory=index == 0)  # watching takes time
        print(index, what, {name: round(value, 2) for name, value in run.items()}, flush=True)
        peaks[what] = max(peaks[what], run["memory_bytes"])
        runs[what] += [run] * (index > 0)
    medians = {what: _median(done, "s") for what, done in runs.items()}
    return {
        "threads": num_threads,
        "file_mib": round(file_bytes / 2**20),
        "weights_mib": round(weight_bytes / 2**20),
        "rounds_s": {what: [round(run["s"], 2) for run in done] for what, done in runs.items()},
        "median_s": {what: round(seconds, 3) for what, seconds in medians.items()},
        "median_cpu_s": {what: round(_median(done, "cpu_s"), 2) for what, done in runs.items()},
        "load_gb_per_s": round(file_bytes / medians[LOAD] / 1e9, 2),
        "read_gb_per_s": round(file_bytes / medians[READ] / 1e9, 2),
        "speed_of_read": round(medians[READ] / medians[LOAD], 3),
        "speed_of_read_ordinary_pages": round(medians[READ_ORDINARY] / medians[LOAD], 3),
        "peak_over_weights": round(peaks[LOAD] / weight_bytes, 3),
    }


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=[QUARTER], choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "alignedserve-models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.shape:
        folder = make_model_folder(arguments.folder / name, SHAPES[name])
        figures[name] = measure(folder, arguments.threads, arguments.rounds)
        print(name, json.dumps(figures[name], indent=1), flush=True)
    print(write_result("loading", figures))


if __name__ == "__main__":
    main()

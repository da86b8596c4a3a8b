"""Two pipeline stages on two hosts of namespaces beside one process with the cores of both: 8 streams, live, in turns.

    python -m benchmarks.cluster.stages_on_hosts [--model pocket]  # as root

Three hosts share the cores of this machine: on two a worker has a stage each, with one thread or --threads, and on the
third one has as many threads as there are cores. Each serves, all through its own gateway, and they take turns at the
same prompts; a client reads streams until all have ended. Target: 90 % of the tokens per second of one process, and the
same tokens.

Stages with a core each read their weights once for each of two groups. What that costs is measured on one core alone:
the rate of half the streams by that of all is the most that two such stages can have of one process.
"""

import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import run_engine_benchmark
from benchmarks.engine.workloads import parse_workload
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import write_result
from tests.harnesses.hosts.cluster_demo import clear_former
from tests.harnesses.hosts.namespace_hosts import NamespaceHost, NamespaceHosts
from tests.harnesses.hosts.rehearsal import PORT, Rehearsal

NAME = "engine/stages_on_hosts"
OPT = "opt-125m"
_READY_S = 300.0
_SETTINGS = ("gateway.host=node", "batches.enabled=false", "engine.calibration_s=0.5", "decode.count=1")
_STAGED = "engine.pipeline_parallel=2"
_PROMPT_LEN = 32  # of the measurement on one core


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """As much of NamespaceHosts as a rehearsal needs, with the first hosts alone."""

    hosts: list[NamespaceHost]
    base: Path
    key: Path


class Streams:
    """Streams of one server, all at once."""

    def __init__(self, url: str, api_key: str, model: str, num_tokens: int) -> None:
        self._url, self._api_key, self._model, self._num_tokens = url, api_key, model, num_tokens

    def run(self, prompts: list[str]) -> tuple[float, list[str]]:
        """Return the seconds until all have ended, and their texts."""
        texts = [""] * len(prompts)
        threads = [threading.Thread(target=self._read, args=(texts, *one)) for one in enumerate(prompts)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began_s, texts

    def _read(self, texts: list[str], place: int, prompt: str) -> None:
        asked = {"model": self._model, "prompt": prompt, "max_tokens": self._num_tokens, "temperature": 0}
        body = json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()
        headers = {"content-type": "application/json", "Authorization": f"Bearer {self._api_key}"}
        request = urllib.request.Request(f"{self._url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=600.0) as response:
            lines = [line[6:] for line in response if line.startswith(b"data: {")]
        texts[place] = "".join(json.loads(line)["choices"][0]["text"] for line in lines if b'"choices":[{' in line)


def rate_of_one_core(model: str, dtype: str, num_streams: int, num_tokens: int) -> float:
    """Return the tokens per second of an engine that has one core."""
    groups = parse_workload(f"{num_streams}x{_PROMPT_LEN}:{num_tokens}")
    spec = EngineBenchmarkSpec(model=model, groups=groups, dtype=dtype)
    core = {min(os.sched_getaffinity(0))}
    with multiprocessing.get_context("spawn").Pool(1, os.sched_setaffinity, (0, core)) as pool:
        return pool.apply(run_engine_benchmark, (spec,)).output_tokens_per_s


def serve_alone(host: NamespaceHost, model: str, settings: tuple[str, ...]) -> None:
    """Serve with one process on a host."""
    options = " ".join(f"--set {one}" for one in settings if one != "gateway.host=node")
    command = f"alignedserve serve {model} {options} --set gateway.host={host.address} --port {PORT}"
    host.run("bash", "-c", f". ~/.bashrc; cd {Path.cwd()}; setsid {command} >/tmp/serve.log 2>&1 </dev/null &")


def wait_ready(url: str) -> None:
    """Wait until a gateway answers."""
    ends_s = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5.0):
                return
        except OSError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.5)


def measure(one: Streams, staged: Streams, num_streams: int, rounds: int) -> dict[str, Any]:
    """Let both take turns; return their seconds and whether they said the same."""
    seconds: dict[str, list[float]] = {"one process": [], "two stages": []}
    are_same = True
    for number in range(rounds + 1):  # the first is not counted
        prompts = [f"Tell me about {number} and about {place + 3 * number}." for place in range(num_streams)]
        found = {"one process": one.run(prompts), "two stages": staged.run(prompts)}
        are_same &= found["one process"][1] == found["two stages"][1]
        for name, (took_s, _) in found.items():
            seconds[name] += [took_s] if number else []
        print({name: round(took_s, 2) for name, (took_s, _) in found.items()}, are_same, flush=True)
    return {"seconds": seconds, "are_same": are_same}


def main() -> None:
    """Start both, measure, print and record."""
    parser = parser_of(__doc__, rounds=7, name=NAME)
    parser.add_argument("--model", default=OPT, help=f"{OPT}: of that shape, with random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of a stage")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-stages"))
    options = parser.parse_args()
    clear_former(options.base)
    hosts = NamespaceHosts(3, options.base, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    options.base.mkdir(mode=0o700, parents=True, exist_ok=True)
    model, random = options.model, tuple[str, ...]()
    if model == OPT:
        model, random = str(make_opt_125m(options.base / OPT)), ("model.random_weights=true",)
    settings = (*_SETTINGS, f"model.dtype={options.dtype}", *random)
    first = TwoHosts(hosts.hosts[:2], options.base, options.base / "key")
    rehearsal = Rehearsal(first, (*settings, _STAGED, f"engine.threads_per_worker={options.threads}"), models=(model,))  # type: ignore[arg-type]
    rehearsal.prepare()
    with hosts:
        serve_alone(hosts.hosts[2], model, settings)
        rehearsal.up()
        urls = [f"http://{hosts.hosts[index].address}:{PORT}" for index in (2, 0)]
        for url in urls:
            wait_ready(url)
        name = Path(model).name
        one, staged = (Streams(url, rehearsal.api_key, name, options.tokens) for url in urls)
        found = measure(one, staged, options.streams, options.rounds)
        rehearsal.ray("down")
    alone = [
        statistics.median(rate_of_one_core(options.model, options.dtype, count, options.tokens) for _ in range(3))
        for count in (options.streams // 2, options.streams)
    ]
    num_tokens = options.streams * options.tokens
    rates = {name: [num_tokens / one for one in took] for name, took in found["seconds"].items()}
    ratios = [staged / one for one, staged in zip(*rates.values(), strict=True)]
    figures = {
        "model": options.model,
        "dtype": options.dtype,
        "streams": options.streams,
        "tokens": options.tokens,
        "tokens_per_s": rates,
        "median_tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "stages_by_one_process": ratios,
        "median_ratio": statistics.median(ratios),
        "target": 0.9,
        "threads_of_a_stage": options.threads,
        "tokens_per_s_of_one_core": {"half the streams": alone[0], "all": alone[1]},
        "most_with_a_core_each": alone[0] / alone[1],
        "same_texts": found["are_same"],
    }
    print(figures["median_tokens_per_s"], figures["median_ratio"])
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()

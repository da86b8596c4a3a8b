"""Real-time chat beside best-effort documents, live, under each policy: BROS's headline (section 7) on this machine.

    python -m benchmarks.scheduling.live_policies                      # 60 s each: about 20 minutes
    python -m benchmarks.scheduling.live_policies --policy aligned_slo --topology colocated --duration 30

A model of 125M OPT's shape with random weights in bfloat16. Real-time: Poisson, 2 requests/s, prompts log-normal around
100 tokens, answers around 60; TTFT 0.4 s, TPOT 0.2 s. Best-effort: 64 requests outstanding, prompts 512 to 1 024,
answers 32 to 128. Per topology first each kind alone, under `aligned_slo`: best-effort alone gives its throughput,
real-time alone the share of the workers' time that it takes. Target for `aligned_slo`: both objectives held by 98 %,
best-effort at 85 % or more of what real-time leaves free. Beside each run stands what the simulator makes of the same
traffic (other draws from the same distributions), with costs fitted to the recording of the two runs alone.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from alignedserve.cli.commands.replay import replay_folder
from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.replay.fitting import MachineFit, fit_machine
from alignedserve.replay.run_file import read_run_metadata
from alignedserve.replay.simulated import SimulatedMachine, fitted_machine, simulate
from alignedserve.sim.policies import with_policy
from alignedserve.sim.result import ALL, ClassResult
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from benchmarks.serving.startup import free_port, wait_ready
from benchmarks.support.command import ALIGNEDSERVE
from benchmarks.support.recording import write_result

POLICIES = ("fcfs", "round_robin", "bros", "accelgen", "aligned_slo")
TOPOLOGIES = ("elastic", "colocated", "disaggregated")
NUM_SIMULATED = 5  # runs of the simulator, whose means are taken
REAL_TIME = "rt: prompt=lognormal(100,300), output=lognormal(60,120), rate=2, ttft=0.4, tpot=0.2"
BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=64, tier=flex"
SHAPE: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "bos_token_id": 2,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}
SETTINGS = (
    "model.random_weights=true",
    "model.dtype=bfloat16",
    "decode.kv_cache_bytes=4GiB",
    "decode.max_running_requests=128",
    "decode.max_num_batched_tokens=2048",
    "router.max_prefill_tokens_per_worker=4096",
)
OF_SEPARATE_WORKERS = (
    "prefill.kv_cache_bytes=1GiB",
    "prefill.max_num_batched_tokens=2048",
    "pool.memory_bytes=4GiB",
)
_BUBBLE = re.compile(r'^alignedserve_bubble_seconds_total\{[^}]*cause="nothing_to_do"[^}]*\} (\S+)', re.MULTILINE)


def make_model(folder: Path) -> None:
    """Make a folder with the shape, and the shipped model's tokenizer.

    Made-up words stand for the rest of the vocabulary: random weights choose any token, and a token without text would
    not be seen by a client.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    shipped = Path(str(files("alignedserve.pocket"))) / "model"
    shutil.copy(shipped / "tokenizer_config.json", folder)
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"word{number}": number for number in range(SHAPE["vocab_size"]) if number not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def settings_of(topology: str) -> list[str]:
    """Return the settings of a server with this topology."""
    separate = OF_SEPARATE_WORKERS if topology == "disaggregated" else ()
    return [*SETTINGS, *separate, f"topology={topology}"]


@contextlib.contextmanager
def served(
    folder: Path, policy: str, topology: str, recording: Path | None = None, *, more_settings: Sequence[str] = ()
) -> Iterator[int]:
    """Start a server on this machine, for as long as the context lasts, and return its port."""
    port = free_port()
    command = [ALIGNEDSERVE, "serve", str(folder), "--port", str(port)]
    command += ["--record", str(recording)] if recording is not None else []
    command += ["--policy", policy]
    for setting in (*settings_of(topology), *more_settings):
        command += ["--set", setting]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"ALIGNEDSERVE_API_KEYS": ""})
        try:
            wait_ready(port)
            yield port
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def load(port: int, folder: Path, traffic: list[str], duration_s: float) -> dict[str, Any]:
    """Return what `bench serve` saw of this traffic, and the share of time in which decode workers were idle."""
    idle_before = idle_s(port)
    command = [ALIGNEDSERVE, "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    command += ["--endpoint", "completions", "--ignore-eos", "--cut-off", "--duration", str(duration_s), "--json", "-"]
    command += ["--tokenizer", str(folder), "--synthetic", "; ".join(traffic)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(answer.stdout)
    report["idle_s"] = idle_s(port) - idle_before
    return report


def idle_s(port: int) -> float:
    """Return the seconds in which workers had nothing to do, since they started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return sum(float(value) for value in _BUBBLE.findall(answer.read().decode()))


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--duration", type=float, default=60.0)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"duration_s": arguments.duration, "real_time": REAL_TIME, "best_effort": BEST_EFFORT}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        for topology in arguments.topology:
            figures[topology] = measure(folder, topology, arguments.policy, arguments.duration)
    print(f"written to {write_result('live_policies', figures)}")


def measure(folder: Path, topology: str, policies: list[str], duration_s: float) -> dict[str, Any]:
    """Measure each kind alone, then both under every policy, beside the simulator's prediction."""
    recording = folder.parent / f"{topology}-alone"
    with served(folder, "aligned_slo", topology, recording) as port:
        load(port, folder, [REAL_TIME], 10.0)  # so that the workers have learned what iterations cost
        alone = {"rt": load(port, folder, [REAL_TIME], duration_s), "be": load(port, folder, [BEST_EFFORT], duration_s)}
    print(topology, "alone:", {kind: short(report) for kind, report in alone.items()}, flush=True)
    machine = fitted_machine(read_run_metadata(recording), fit_to(recording))
    both: dict[str, Any] = {}
    simulated: dict[str, Any] = {}
    for policy in policies:
        with served(folder, policy, topology) as port:
            load(port, folder, [REAL_TIME], 10.0)
            both[policy] = load(port, folder, [REAL_TIME, BEST_EFFORT], duration_s)
        print(topology, policy, short(both[policy]), flush=True)
        simulated[policy] = predicted(machine, policy, topology, duration_s)
        print(topology, policy, "simulated:", simulated[policy], flush=True)
    return {"alone": alone, "both": both, "simulated": simulated}


def fit_to(recording: Path) -> MachineFit:
    """Fit the costs of iterations and copies of this run."""
    return fit_machine(replay_folder(recording)[1], read_run_metadata(recording).layout.block_bytes)


def predicted(machine: SimulatedMachine, policy: str, topology: str, duration_s: float) -> dict[str, Any]:
    """Return what the simulator predicts for both kinds under a policy: means over draws of the traffic, as `short`
    has them. Best-effort requests that end after the last arrival do not count, as live, where they are cut off.
    """
    cluster = load_config(None, settings_of(topology))
    machine = replace(machine, cluster=with_policy(cluster, policy, topology=Topology(topology)))
    runs = []
    for seed in range(NUM_SIMULATED):
        traffic = "; ".join((REAL_TIME, BEST_EFFORT))
        workload = build_workload(traffic, seed=seed, library=Library(), duration_s=duration_s)
        runs.append(simulate(workload, machine, seed))
    return {
        name: {
            "completed": round(statistics.fmean(_num_completed(name, run[name], duration_s) for run in runs), 1),
            "held": _mean([run[name].attainment for run in runs]),
            "ttft_p50": _mean([one.distribution.p50 for run in runs if (one := run[name].ttft_s)]),
            "tpot_p50": _mean([one.distribution.p50 for run in runs if (one := run[name].tpot_s)]),
        }
        for name in runs[0]
        if name != ALL
    }


def _num_completed(name: str, of_class: ClassResult, duration_s: float) -> float:
    is_cut_off = name == "be"
    return of_class.loaded_requests_per_s * duration_s if is_cut_off else of_class.num_by_ending["completed"]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.fmean(present), 3) if present else None


def short(report: dict[str, Any]) -> dict[str, Any]:
    """Return what matters of a report, for the screen: requests completed, their medians, and the share that held."""
    return {
        one["name"]: {
            "completed": one["num_completed"],
            "held": one["slo_attainment"],
            "ttft_p50": one["ttft_s"] and round(one["ttft_s"]["p50"], 3),
            "tpot_p50": one["tpot_s"] and round(one["tpot_s"]["p50"], 3),
        }
        for one in report["report"]["classes"]
    }


if __name__ == "__main__":
    main()

"""Distance of the simulator from the live system: serve under load twice, fit on the first run, judge on the second.

    python -m benchmarks.simulation.simulated_vs_live [--topology colocated|disaggregated]
        [--model pocket|opt-125m] [--duration S]

Both runs are recorded, and every decision of both is checked. The load of the second has another seed. Each run starts
a cluster of its own; nothing else should compute meanwhile: the load average of the machine stands in the result.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignedserve.cli.bench.options import LoadOptions
from alignedserve.cli.bench.serve import bench_serve
from alignedserve.cli.commands.options import ReplayOptions
from alignedserve.cli.commands.replay import (
    ComponentCheck,
    SimulatedTimes,
    replay_folder,
    simulate_beside,
)
from alignedserve.cli.wiring import start_cluster
from alignedserve.config.loading import load_config
from alignedserve.microbench.shapes import OPT_125M
from alignedserve.runtime.model.built_in import pocket_folder
from benchmarks.support.recording import write_result

RT = "rt: rate={rate}, prompt=lognormal(100,300), output=exponential(60), max_output=200, ttft=0.4, tpot=0.2"
BE = "be: outstanding={outstanding}, prompt=uniform(200,500), output=uniform(32,128), tier=flex"
THROUGHPUT, TIMES = 0.10, 0.15  # what the ratios of throughput and of times may be off
JUDGED = ("requests/s", "ttft p50, s", "ttft p90, s", "tbt p50, s", "tbt p90, s")


def write_opt_125m(folder: Path) -> Path:
    """Return the shape of OPT-125M, to be served with random weights and the shipped tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_folder() / name, folder / name)
    shape = OPT_125M
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "ffn_dim": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "word_embed_proj_dim": shape.embedding_size,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "eos_token_id": shape.eos_token_ids[0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def record_run(folder: Path, overrides: list[str], load: str, duration_s: float, seed: int) -> None:
    """Serve, put the load on, and leave the recording in `folder`. In a process of its own: a process can start one
    Ray cluster."""
    config = load_config(None, [*overrides, "batches.enabled=false", f"recording.folder={json.dumps(str(folder))}"])
    with start_cluster(config) as cluster:
        cluster.wait_ready(120.0)
        options = LoadOptions(
            url=cluster.url,
            endpoint="completions",
            synthetic=load,
            duration_s=duration_s,
            ignore_eos=True,
            seed=seed,
            json_target=f"{folder}.json",
        )
        bench_serve(options)


def judged(times: SimulatedTimes) -> dict[str, bool]:
    """Return whether each measure of all requests is within its bound."""
    within = {}
    for one in times.comparisons:
        if one.class_name == "all" and one.measure in JUDGED and one.ratio is not None:
            bound = THROUGHPUT if one.measure == "requests/s" else TIMES
            within[one.measure] = abs(one.ratio - 1.0) <= bound
    return within


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Record twice, compare; everything that a page needs."""
    overrides = [f"topology={arguments.topology}", f"scheduling.policy={arguments.policy}"]
    if arguments.model == "opt-125m":
        model = write_opt_125m(folder / "model")
        overrides += [f"model.path={model}", "model.random_weights=true", "model.dtype=bfloat16"]
        overrides += [f"decode.kv_cache_bytes={1 << 30}"]
        if arguments.topology == "disaggregated":
            overrides += [f"pool.memory_bytes={1 << 30}"]
            overrides += [f"prefill.{field}_bytes={1 << 29}" for field in ("kv_cache", "candidate_buffer")]
    parts = [RT.format(rate=arguments.rate)]
    parts += [BE.format(outstanding=arguments.outstanding)] if arguments.outstanding else []
    load = "; ".join(parts)
    loads = []
    for seed in (1, 2):
        before = os.getloadavg()[0]
        call = (folder / f"run-{seed}", overrides, load, arguments.duration, seed)
        process = multiprocessing.get_context("spawn").Process(target=record_run, args=call)
        process.start()
        process.join()
        assert process.exitcode == 0, "the run failed"
        loads.append((before, os.getloadavg()[0]))
    outstanding = {"be": arguments.outstanding} if arguments.outstanding else {}
    fitted, unseen = (_compare(folder, seed, outstanding) for seed in (1, 2))
    return {
        "topology": arguments.topology,
        "model": arguments.model,
        "policy": arguments.policy,
        "load": load,
        "seconds": arguments.duration,
        "load_average_before_and_after": loads,
        "decisions_of_fitted_run": [_decisions(check) for check in fitted[0]],
        "decisions_of_unseen_run": [_decisions(check) for check in unseen[0]],
        "unseen_run_within_bounds": judged(unseen[1]),
        "fitted_run": [asdict(one) | {"ratio": one.ratio} for one in fitted[1].comparisons],
        "unseen_run": [asdict(one) | {"ratio": one.ratio} for one in unseen[1].comparisons],
        "fit": {
            "decode": unseen[1].fit.decode.error._asdict(),
            "prefill": unseen[1].fit.prefill.error._asdict() if unseen[1].fit.prefill else None,
            "slowdown": unseen[1].fit.slowdown,
            "message_s": unseen[1].fit.links.message_s,
        },
    }


def _compare(folder: Path, seed: int, outstanding: dict[str, int]) -> tuple[list[ComponentCheck], SimulatedTimes]:
    options = ReplayOptions(folder / f"run-{seed}", fit_on=folder / "run-1" if seed != 1 else None)
    checks, run = replay_folder(options.folder)
    return checks, simulate_beside(options, run, outstanding)


def _decisions(check: ComponentCheck) -> dict[str, Any]:
    per_s = round(check.num_equal / check.seconds) if check.seconds else None
    return {
        "room": check.component,
        "equal": check.num_equal,
        "differs": check.difference is not None,
        "events_per_s": per_s,
    }


def main() -> None:
    """Print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=("colocated", "disaggregated"), default="colocated")
    parser.add_argument("--model", choices=("pocket", "opt-125m"), default="pocket")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--outstanding", type=int, default=4)
    parser.add_argument("--duration", type=float, default=40.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(arguments, Path(name))
    print(json.dumps(figures["unseen_run"], indent=1))
    print(figures["unseen_run_within_bounds"])
    print(write_result(f"simulated_vs_live_{arguments.model}_{arguments.topology}", figures))


if __name__ == "__main__":
    main()

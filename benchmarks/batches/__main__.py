"""Batches: how fast they are accepted, what their bookkeeping costs, what they reach, and what they take from chat.

    python -m benchmarks.batches                       # everything: about ten minutes
    python -m benchmarks.batches --only accept bookkeeping

accept        50 000 lines of chat: uploaded, created, validated (10 s or less), memory of the driver before and after,
              beside a file of the same number of lines and twenty times the bytes; cancelled with most of them left
bookkeeping   milliseconds of one core per line of the driver and its store, the runner answering at once (at most 0.5);
              and what every process of a real cluster used per line, which is bookkeeping and request together
throughput    a batch of short lines on an idle cluster of one worker beside the engine alone on the same work (95 %)
chat          real-time attainment of a load alone, and beside a batch that never ends (1 point or less)
Every part leaves its figures beside those of the others.
"""

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.batches.bookkeeping import measure_bookkeeping
from benchmarks.batches.kills import make_tasks
from benchmarks.engine.apart import output_tokens_per_s
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.batch_client import BatchHttpClient, chat_file
from benchmarks.measuring.kill_cluster import KillCluster, kill_cluster
from benchmarks.measuring.kill_schedules import Target
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import load_report, options_of, settings_of

_NAME = "batches/batches"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_NUM_LINES = 50_000
_WORK = (128, 64, 64)  # lines, prompt tokens, answer tokens
_REAL_TIME = "rt: prompt=lognormal(100,300), output=lognormal(60,120), rate=1.5, ttft=0.4, tpot=0.2"
_CHAT_S = 100.0  # some 150 requests: two thirds of a point each
_ROLES = [target for target in Target if target not in (Target.ALL, Target.COMMAND)]


def accept() -> dict[str, Any]:
    with cluster_of("pocket") as (cluster, client):
        figures: dict[str, Any] = {"idle_mib": driver_mib(cluster)}
        for name, padding in (("short_lines", 0), ("long_lines", 3600)):
            content = chat_file([(f"line-{n}", "spell otter") for n in range(_NUM_LINES)], "pocket")
            content = content.replace(b'{"custom_id"', b"{" + b" " * padding + b'"custom_id"')
            figures[name] = accepted(cluster, client, content)
            print(name, figures[name], flush=True)
    return figures


def accepted(cluster: KillCluster, client: BatchHttpClient, content: bytes) -> dict[str, Any]:
    """Measure a file: its upload, creation and validation, and the cancelling of its batch."""
    began_s = time.monotonic()
    file_id = client.upload(content)
    uploaded_s = time.monotonic()
    batch_id = client.create(file_id, _CHAT)
    created_s = time.monotonic()
    client.wait(batch_id, lambda batch: batch["status"] != "validating")
    validated_s = time.monotonic()
    client.wait(batch_id, lambda batch: batch["request_counts"]["completed"] >= 200)
    memory_mib = driver_mib(cluster)
    asked_s = time.monotonic()
    client.cancel(batch_id)
    batch = client.wait(batch_id)
    return {
        "bytes": len(content),
        "upload_s": round(uploaded_s - began_s, 2),
        "create_s": round(created_s - uploaded_s, 3),
        "validate_s": round(validated_s - created_s, 2),
        "all_s": round(validated_s - began_s, 2),
        "driver_mib": memory_mib,
        "cancel_s": round(time.monotonic() - asked_s, 2),
        "lines_cancelled": batch["alignedserve"]["lines_cancelled"],
    }


def bookkeeping() -> dict[str, Any]:
    alone = measure_bookkeeping(20_000, chat_file([(f"line-{n}", "spell otter") for n in range(20_000)], "pocket"))
    print("alone", alone, flush=True)
    num_lines = 3000
    tasks = [(name, task.prompt) for name, task in make_tasks(num_lines).items()]
    with cluster_of("pocket") as (cluster, client):
        client.wait(client.submit(chat_file(tasks[:200], "pocket"), _CHAT))
        before = used_s(cluster)
        began_s = time.monotonic()
        client.wait(client.submit(chat_file(tasks, "pocket"), _CHAT))
        took_s = time.monotonic() - began_s
        after = used_s(cluster)
    per_line = {role: round((after[role] - before[role]) / num_lines * 1e3, 3) for role in after}
    return {"alone": alone, "cluster_ms_per_line": per_line, "cluster_lines_per_s": round(num_lines / took_s, 1)}


def throughput() -> dict[str, Any]:
    count, prompt_len, output_len = _WORK
    with tempfile.TemporaryDirectory() as name:
        folder = make_opt_125m(Path(name) / "opt-125m")
        engine_rate = output_tokens_per_s(f"{count}x{prompt_len}:{output_len}")
        with cluster_of(str(folder), *options_of(settings_of("elastic"))) as (_, client):
            content = completion_file(folder.name, count, prompt_len, output_len)
            client.wait(client.submit(content[: content.index(b"\n") + 1], _COMPLETIONS))
            began_s = time.monotonic()
            batch = client.wait(client.submit(content, _COMPLETIONS))
            took_s = time.monotonic() - began_s
    assert batch["request_counts"]["completed"] == count, batch
    batch_rate = batch["usage"]["output_tokens"] / took_s
    return {
        "work": f"{count}x{prompt_len}:{output_len}",
        "engine_output_tokens_per_s": round(engine_rate, 1),
        "batch_output_tokens_per_s": round(batch_rate, 1),
        "share": round(batch_rate / engine_rate, 3),
    }


def chat() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = make_opt_125m(Path(name) / "opt-125m")
        with cluster_of(str(folder), *options_of(settings_of("elastic"))) as (cluster, client):
            load(cluster, folder, 5.0)
            alone = load(cluster, folder, _CHAT_S)
            batch_id = client.submit(completion_file(folder.name, 5000, 256, 96), _COMPLETIONS)
            client.wait(batch_id, lambda batch: batch["request_counts"]["completed"] > 0)
            beside = load(cluster, folder, _CHAT_S)
            counts = client.cancel(batch_id)["request_counts"]
            client.wait(batch_id)
    moved = round(100 * (alone["slo_attainment"] - beside["slo_attainment"]), 2)
    return {"load": _REAL_TIME, "alone": alone, "beside": beside, "points_lost": moved, "lines_meanwhile": counts}


def load(cluster: KillCluster, folder: Path, duration_s: float) -> dict[str, Any]:
    """Put on the real-time load; return what `bench serve` measured."""
    options = ("--duration", str(duration_s), "--tokenizer", str(folder), "--synthetic", _REAL_TIME)
    report = load_report(cluster.port, *options)
    kept = ("num_sent", "num_completed", "slo_attainment", "ttft_s", "tpot_s")
    return {name: report["classes"][0].get(name) for name in kept}


def completion_file(model: str, count: int, prompt_len: int, output_len: int) -> bytes:
    bodies = [
        {
            "model": model,
            "prompt": [10 + (number * 7 + place) % 480 for place in range(prompt_len)],
            "max_tokens": output_len,
            "ignore_eos": True,
            "temperature": 0,
        }
        for number in range(count)
    ]
    fields = {"method": "POST", "url": _COMPLETIONS}
    lines = [{"custom_id": f"line-{number}", **fields, "body": body} for number, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@contextlib.contextmanager
def cluster_of(model: str, *options: str) -> Iterator[tuple[KillCluster, BatchHttpClient]]:
    with tempfile.TemporaryDirectory(prefix="batches-") as name, kill_cluster(Path(name), (model, *options)) as cluster:
        yield cluster, BatchHttpClient(cluster.url, patience_s=600.0)


def driver_mib(cluster: KillCluster) -> float:
    return round(float(cluster.processes(Target.DRIVER)[-1].memory_full_info().uss) / (1 << 20), 1)


def used_s(cluster: KillCluster) -> dict[str, float]:
    return {role.value: sum(_cpu_s(process) for process in cluster.processes(role)) for role in _ROLES}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "accept": accept,
    "bookkeeping": bookkeeping,
    "throughput": throughput,
    "chat": chat,
}


def main() -> None:
    """Measure, and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are ended
    for name in parser.parse_args().only:
        part = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), **_PARTS[name]()}
        print(name, json.dumps(part, indent=2), flush=True)
        write_result(_NAME, (read_figures(_NAME) or {}) | {name: part})


if __name__ == "__main__":
    main()

"""A model is replaced while it serves: does a request fail, and how long do first tokens take meanwhile?

    python -m benchmarks.serving.model_replacement                  # 5 requests/s, replaced after 15 s
    python -m benchmarks.serving.model_replacement --added smollm2  # a larger model is added instead
    python -m benchmarks.serving.model_replacement --sharing        # a chat model beside another model's documents

Streams of the pocket model begin at a fixed rate; midway `alignedserve models replace` puts another deployment of it in
its place. Requests are told apart by when they began: before the order, until the command returned, after. Targets: no
failed request; a p99 of the time to the first token at most twice that of before. With `--sharing`: the gaps between
tokens of a chat with one model while another has a heap of documents, with iterations that give way and without.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.support.command import ALIGNEDSERVE
from benchmarks.support.kill_cluster import KillCluster
from benchmarks.support.recording import write_result

_COMMON = ("--set", "model.dtype=float32", "--set", "batches.enabled=false")
_TOKENS = 48  # of an answer
_CHAT_TOKENS = 300
_NUM_DOCUMENTS = 24
_DOCUMENT_TOKENS = 400


def call(model: str, prompt: str, max_tokens: int, **fields: object) -> CompletionCall:
    """Return a greedy completion of fixed length."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return CompletionCall(CompletionApi.COMPLETIONS, body)


async def measure_replacement(cluster: KillCluster, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one replacement under load."""
    outcomes: list[CompletionOutcome] = []
    tasks: list[asyncio.Task[CompletionOutcome]] = []
    order: asyncio.Task[tuple[float, float]] | None = None
    async with OpenAiClient(url=cluster.url) as client:
        began_s, number = time.monotonic(), 0
        while order is None or not order.done() or time.monotonic() < order.result()[1] + options.seconds:
            outcomes.append(CompletionOutcome())
            prompt = f"count from {number % 50} to {number % 50 + 9} " * 4
            tasks.append(asyncio.create_task(client.complete(call("m", prompt, _TOKENS), outcomes[-1])))
            number += 1
            if order is None and time.monotonic() - began_s > options.seconds:
                order = asyncio.create_task(_change(cluster.folder, options.added))
            await asyncio.sleep(max(began_s + number / options.rate - time.monotonic(), 0.0))
        await asyncio.gather(*tasks)
    first_s, last_s = order.result()
    settled = [one for one in outcomes if one.sent_s > began_s + 2.0]
    parts = {
        "before": [one for one in settled if one.sent_s < first_s],
        "during": [one for one in settled if first_s <= one.sent_s < last_s],
        "after": [one for one in settled if one.sent_s >= last_s],
    }
    figures: dict[str, Any] = {name: _row(part) for name, part in parts.items()}
    bounds = {"before": (began_s + 2.0, first_s), "during": (first_s, last_s), "after": (last_s, last_s + 1e9)}
    for name, (start_s, stop_s) in bounds.items():
        figures[name] |= _gaps_between(outcomes, start_s, stop_s)
    figures["change_s"] = round(last_s - first_s, 2)
    figures["num_failed"] = sum(one.failure is not None for one in outcomes)
    figures["num_cut"] = sum(one.num_tokens != _TOKENS for one in outcomes)
    figures["ttft_p99_during_over_before"] = round(figures["during"]["ttft_p99_s"] / figures["before"]["ttft_p99_s"], 2)
    return figures


async def _change(folder: Path, added: str | None) -> tuple[float, float]:
    """Replace the model, or add another; return when the command began and returned."""
    began_s = time.monotonic()
    order = ("replace", "m", "pocket") if added is None else ("add", added, "--name", "other")
    command = await asyncio.create_subprocess_exec(
        *(str(ALIGNEDSERVE), "models", *order),
        env={**os.environ, "ALIGNEDSERVE_RUN_DIR": str(folder / "run")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert await command.wait() == 0, "the order was refused"
    return began_s, time.monotonic()


def _gaps_between(outcomes: list[CompletionOutcome], start_s: float, stop_s: float) -> dict[str, float]:
    """Return the gaps between tokens of running streams that ended within a time."""
    gaps = [
        later - earlier
        for one in outcomes
        for earlier, later in itertools.pairwise(one.token_times_s)
        if start_s <= later < stop_s
    ]
    ranks = {f"gap_p{rank}_ms": round(float(np.percentile(gaps, rank)) * 1e3, 2) for rank in (50, 99)}
    return ranks | {"gap_max_ms": round(max(gaps) * 1e3, 2)}


def _row(outcomes: list[CompletionOutcome]) -> dict[str, Any]:
    first_s = [one.token_times_s[0] - one.sent_s for one in outcomes if one.token_times_s]
    return {
        "num_requests": len(outcomes),
        "num_failed": sum(one.failure is not None for one in outcomes),
        "ttft_p50_s": round(float(np.percentile(first_s, 50)), 4),
        "ttft_p99_s": round(float(np.percentile(first_s, 99)), 4),
    }


async def measure_sharing(cluster: KillCluster) -> dict[str, Any]:
    """Return the gaps of a chat alone, and beside another model's documents, and how fast those were."""
    async with OpenAiClient(url=cluster.url) as client:
        chat = call("chat", "tell me a long story about an otter", _CHAT_TOKENS)
        await client.complete(chat, CompletionOutcome())
        alone = await client.complete(chat, CompletionOutcome())
        documents = [
            call("documents", f"count from {number} to 99 " * 20, _DOCUMENT_TOKENS, service_tier="flex")
            for number in range(_NUM_DOCUMENTS)
        ]
        results = [CompletionOutcome() for _ in documents]
        tasks = [asyncio.create_task(client.complete(*pair)) for pair in zip(documents, results, strict=True)]
        await asyncio.sleep(1.0)
        began_s = time.monotonic()
        beside = await client.complete(chat, CompletionOutcome())
        ended_s = time.monotonic()
        is_covered = not all(task.done() for task in tasks)
        num_tokens = sum(began_s < at <= ended_s for one in results for at in one.token_times_s)
        await asyncio.gather(*tasks)
    return {
        "alone": _gaps(alone),
        "beside_documents": _gaps(beside),
        "document_tokens_per_s_meanwhile": round(num_tokens / (ended_s - began_s), 1),
        "documents_lasted": is_covered,
        "num_failed": sum(one.failure is not None for one in (alone, beside, *results)),
    }


def _gaps(outcome: CompletionOutcome) -> dict[str, float]:
    gaps = [later - earlier for earlier, later in itertools.pairwise(outcome.token_times_s)]
    return {f"tbt_p{rank}_ms": round(float(np.percentile(gaps, rank)) * 1e3, 2) for rank in (50, 95, 99)}


def replaced(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a replacement on a fresh cluster."""
    with tempfile.TemporaryDirectory(prefix="replace-") as name:
        cluster = KillCluster(Path(name), ("m=pocket", *_COMMON))
        cluster.start()
        try:
            return asyncio.run(measure_replacement(cluster, options))
        finally:
            cluster.stop()


def shared() -> dict[str, Any]:
    """Measure sharing, with iterations that give way (the default) and without."""
    figures = {}
    for label, share in (("gives_way", 0.1), ("gives_no_way", 1.0)):
        with tempfile.TemporaryDirectory(prefix="share-") as name:
            options = ("chat=pocket", "documents=pocket", *_COMMON, "--set", f"engine.best_effort_share={share}")
            cluster = KillCluster(Path(name), options)
            cluster.start()
            try:
                figures[label] = asyncio.run(measure_sharing(cluster))
            finally:
                cluster.stop()
        print(label, figures[label], flush=True)
    return figures


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="before the order, and after it")
    parser.add_argument("--added", metavar="MODEL", help="add this model instead of replacing the one that serves")
    parser.add_argument("--sharing", action="store_true")
    parser.add_argument("--loaded", action="store_true", help="note that other programs used the cores")
    options = parser.parse_args()
    figures = shared() if options.sharing else replaced(options)
    figures["cores_were_loaded"] = options.loaded
    print(figures)
    name = "model_sharing" if options.sharing else "model_replacement" if options.added is None else "model_addition"
    print(write_result(name, figures))


if __name__ == "__main__":
    main()

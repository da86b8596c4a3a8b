"""A batch whose lines begin with one instruction, with the prefix cache and without.

    python -m benchmarks.prefix_cache.common_instruction [--model opt pocket] [--lines 500] [--lines-without 32]

Lines of 1 000 tokens in common, 60 of their own, and 32 to generate, as completions of token ids through Files and
Batches. The 125M OPT shape in bfloat16 with random weights, or the pocket model. Without the cache, with it, and
without it again, each on a fresh server, after a batch of other prompts that warms it up. Lines per second: from the
creation of the batch until its record says that it is over. Without the cache every line costs the same, so that fewer
lines tell its speed (`--lines-without`, each time). `ratio`: to the mean of both. Target: 4 times the lines per second.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.runtime.model.built_in import pocket_folder
from benchmarks.scheduling.live_policies import make_model, served
from benchmarks.support.batch_client import BatchHttpClient
from benchmarks.support.recording import write_result

NAME = "common_instruction"
MODELS = ("opt", "pocket")
NUM_COMMON, NUM_OWN, NUM_OUT = 1000, 60, 32
WARM_UP_LINES = 4
POLICY = "aligned_slo"
_FIRST_TOKEN, _NUM_TOKENS = 300, 500  # ids that every vocabulary here has, and none is special


def lines_of(model: str, num_lines: int, instruction: Sequence[int], rng: random.Random) -> bytes:
    """Return an input file: this instruction and other tokens of their own in every line."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": [*instruction, *tokens(NUM_OWN, rng)],
                "max_tokens": NUM_OUT,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(num_lines)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def tokens(count: int, rng: random.Random) -> list[int]:
    """Return random ordinary tokens."""
    return [_FIRST_TOKEN + rng.randrange(_NUM_TOKENS) for _ in range(count)]


def run_batch(client: BatchHttpClient, content: bytes) -> dict[str, Any]:
    """Run a batch to its end; return its lines per second and the share of input tokens that were cached."""
    file_id = client.upload(content)
    began_s = time.monotonic()
    batch = client.wait(client.create(file_id, "/v1/completions"))
    took_s = time.monotonic() - began_s
    num_lines = batch["request_counts"]["completed"]
    assert num_lines == content.count(b"\n"), f"lines failed: {batch['request_counts']}"
    usage = batch["usage"]
    return {
        "lines": num_lines,
        "seconds": round(took_s, 2),
        "lines_per_s": round(num_lines / took_s, 3),
        "cached_share": round(usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"], 4),
    }


def measure(folder: Path, model: str, num_lines: int, *, is_cached: bool, workers: int) -> dict[str, Any]:
    """Measure one system on a fresh server."""
    rng = random.Random(7)
    settings = [f"prefix_cache.enabled={'true' if is_cached else 'false'}", f"decode.count={workers}"]
    with tempfile.TemporaryDirectory() as state:
        settings.append(f"batches.folder={state}")
        with served(folder, POLICY, "elastic", more_settings=settings) as port:
            client = BatchHttpClient(f"http://127.0.0.1:{port}")
            run_batch(client, lines_of(model, WARM_UP_LINES, tokens(NUM_COMMON, rng), rng))
            return run_batch(client, lines_of(model, num_lines, tokens(NUM_COMMON, rng), rng))


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure without the cache, with it, and without it again."""
    before, cached, after = (
        measure(folder, folder.name, num_lines, is_cached=is_cached, workers=options.workers)
        for num_lines, is_cached in (
            (options.lines_without, False),
            (options.lines, True),
            (options.lines_without, False),
        )
    )
    without = (before["lines_per_s"] + after["lines_per_s"]) / 2
    return {"without": [before, after], "with": cached, "ratio": round(cached["lines_per_s"] / without, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--lines-without", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--name", default=NAME)
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {"tokens": [NUM_COMMON, NUM_OWN, NUM_OUT], "workers": options.workers}
    with tempfile.TemporaryDirectory() as name:
        opt = Path(name) / "opt-125m"
        make_model(opt)
        for model, folder in (("opt", opt), ("pocket", pocket_folder())):
            if model in options.model:
                figures[model] = compare(folder, options)
                print(model, figures[model], flush=True)
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()

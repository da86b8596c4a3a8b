"""Processes that share a mixture's experts beside one process: python -m benchmarks.engine.shared_experts.

One process with one thread, one with two, and two of one thread each that share its experts, whole, in turns: prompts,
and decodes of 1, 8 and 32 streams. The tokens of all are the same. Beside what was measured stands what
`alignedserve plan` calculates of one thread's times (costmodel/shared_experts.py).
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from lab.costmodel.shared_experts import ExpertSharing

PROMPT_LEN, OUTPUT_LEN = 64, 17
STREAMS = (1, 8, 32)
_BLOCK_SIZE = 16
_CONTEXT_BLOCKS = -(-(PROMPT_LEN + OUTPUT_LEN) // _BLOCK_SIZE)
_MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
}
FORMS = {"one process, one thread": (1, 1), "one process, two threads": (1, 2), "two processes": (2, 2)}


class Taken(NamedTuple):
    """Seconds of one turn, and its tokens."""

    prompts_s: float
    decode_s: float  # an iteration
    tokens: tuple[tuple[int, ...], ...]


class Worker:
    """An engine, and the processes that share its experts."""

    def __init__(self, served: ServedModel, num_threads: int) -> None:
        sizes = EngineSizes(1 << 28, max(STREAMS), _BLOCK_SIZE, num_threads=num_threads)
        self._executor = ModelExecutor(served, sizes)
        self._num_threads = torch.get_num_threads()  # which is one number for the workers of this process
        self._number = 0

    def take(self, num_streams: int) -> Taken:
        """Answer so many prompts, all in one batch."""
        torch.set_num_threads(self._num_threads)
        self._number += 1
        added = [self._addition(stream) for stream in range(num_streams)]
        ids = [one.request.request_id for one in added]
        started = time.perf_counter()
        sampled = [self._run(RunIteration((), tuple(added), (), tuple((one, PROMPT_LEN) for one in ids)))]
        prompts_s = time.perf_counter() - started
        seconds = []
        for _ in range(OUTPUT_LEN - 1):
            started = time.perf_counter()
            sampled.append(self._run(RunIteration((), (), (), tuple((one, 1) for one in ids))))
            seconds.append(time.perf_counter() - started)
        self._executor.run_iteration(RunIteration(tuple(ids), (), (), ()))
        tokens = tuple(tuple(token.token_id for token in one.sampled) for one in sampled)
        return Taken(prompts_s, statistics.median(seconds), tokens)

    def close(self) -> None:
        """End its processes."""
        self._executor.close()

    def _run(self, command: RunIteration) -> IterationCompleted:
        completed = self._executor.run_iteration(command)
        assert not completed.failed, completed.reasons
        return completed

    def _addition(self, stream: int) -> Addition:
        tokens = tuple(3 + (stream * 131 + place * 17) % 4000 for place in range(PROMPT_LEN))
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        request = Request(RequestId(f"{self._number}-{stream}"), tokens, sampling, "", 0.0)
        first = stream * _CONTEXT_BLOCKS
        return Addition(request, (), tuple(map(BlockId, range(first, first + _CONTEXT_BLOCKS))), 0)


@contextmanager
def workers(dtype: str, layers: int) -> Iterator[dict[str, Worker]]:
    """Start a worker of each form, with the same random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_MIXTURE, "num_hidden_layers": layers}))
        section = ModelSectionConfig(path=folder, random_weights=True, dtype=dtype)
        started = {
            form: Worker(resolve_model(section, EngineConfig(expert_parallel=size)), num_threads)
            for form, (size, num_threads) in FORMS.items()
        }
        yield started
        for worker in started.values():
            worker.close()


def round_trip_s(num_bytes: int, count: int = 2000) -> float:
    """Return the median seconds in which so many bytes come back from another process of this host."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        while content := theirs.recv(num_bytes, socket.MSG_WAITALL):
            theirs.sendall(content)
        os._exit(0)
    theirs.close()
    seconds, content = [], bytes(num_bytes)
    for _ in range(count):
        started = time.perf_counter()
        ours.sendall(content)
        ours.recv(num_bytes, socket.MSG_WAITALL)
        seconds.append(time.perf_counter() - started)
    ours.close()
    os.waitpid(child, 0)
    return statistics.median(seconds)


def calculated(served: ServedModel, alone: dict[str, float]) -> dict[str, float]:
    """Return what `plan` expects of two processes by one, of an iteration that takes these seconds by one alone."""
    sharing = ExpertSharing(served.decoder.shape(served.name, served.dtype), 2)
    found = {}
    for name, seconds in alone.items():
        num_tokens = PROMPT_LEN * max(STREAMS) if name == "prompts" else int(name)
        costs = LinearCoefficients(prompt_token_s=seconds / num_tokens)
        if name == "prompts":
            shared_s = num_tokens * sharing.shared(costs).prompt_token_s + sharing.exchange_s(0)
        else:
            shared = sharing.shared(replace(costs, prompt_token_s=0.0, base_s=seconds))
            shared_s = shared.base_s + num_tokens * shared.decode_s
        found[name] = shared_s / seconds
    return found


def measured(started: dict[str, Worker], num_rounds: int) -> dict[str, Any]:
    """Return the seconds of each form by streams, and the ratios of the last form to the others, turn by turn."""
    report: dict[str, Any] = {}
    for streams in STREAMS:
        turns: dict[str, list[Taken]] = {form: [] for form in started}
        for number in range(num_rounds + 1):
            taken = {form: worker.take(streams) for form, worker in started.items()}
            assert len({one.tokens for one in taken.values()}) == 1, "other tokens"
            if number:  # after a warm-up
                for form, one in taken.items():
                    turns[form].append(one)
        for part in ("prompts_s", "decode_s") if streams == max(STREAMS) else ("decode_s",):
            name = "prompts" if part == "prompts_s" else str(streams)
            seconds = {form: [getattr(one, part) for one in each] for form, each in turns.items()}
            shared = seconds["two processes"]
            report[name] = {
                "seconds": {form: statistics.median(each) for form, each in seconds.items()},
                "two_processes_by": {
                    form: _spread([one / other for one, other in zip(shared, each, strict=True)])
                    for form, each in seconds.items()
                    if form != "two processes"
                },
            }
    return report


def _spread(ratios: list[float]) -> list[float]:
    return [statistics.median(ratios), min(ratios), max(ratios)]


def main() -> None:
    """Measure, print and record."""
    parser: argparse.ArgumentParser = parser_of(__doc__, rounds=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    link = {f"{size}": round_trip_s(size) for size in (64, 65536, 1 << 20)}
    with workers(arguments.dtype, arguments.layers) as started, tempfile.TemporaryDirectory() as folder:
        report = measured(started, arguments.rounds)
        (Path(folder) / "config.json").write_text(json.dumps({**_MIXTURE, "num_hidden_layers": arguments.layers}))
        served = resolve_model(ModelSectionConfig(path=folder, random_weights=True, dtype=arguments.dtype))
    alone = {name: one["seconds"]["one process, one thread"] for name, one in report.items()}
    for name, ratio in calculated(served, alone).items():
        report[name]["calculated_by_one_thread"] = ratio
    figures = {
        "model": {**_MIXTURE, "num_hidden_layers": arguments.layers},
        "dtype": arguments.dtype,
        "round_trip_s_by_bytes": link,
        "iterations": report,
    }
    print(json.dumps(figures, indent=2))
    write_result(f"engine/shared_experts_{arguments.dtype}", figures)


if __name__ == "__main__":
    main()

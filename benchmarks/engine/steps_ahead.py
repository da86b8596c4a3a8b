"""Steps that are launched before the tokens of the one before are known, on a stand-in for a device.

The device computes each pass in a set time, the host takes a set time for each step, and both clocks are counted, not
read: what is left between two passes is the gap that launching ahead is to close. The engine is the real one, and so
are its tokens. 64 sequences get blocks of 16 tokens one by one, as schedulers give them.

    python -m benchmarks.engine.steps_ahead [--device-ms 8] [--host-ms 1] [--steps 200]
    python -m benchmarks.engine.steps_ahead --before FOLDER [--rounds 9]   # this CPU's steps, against another checkout
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.microbench.shapes import LLAMA_0_5B
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.device.streams import HostStream
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.engine.sampling import logits_processors
from alignedserve.runtime.engine.steps.step_launch import StepLaunch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import RopeConfig
from alignedserve.runtime.model.random_weights import random_weights

NUM_ROWS, BLOCK_SIZE, CONTEXT_LEN, VOCABULARY = 64, 16, 200, 1000
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10_000)
PENALISED = replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2)
KINDS = {"greedy": GREEDY, "penalised": PENALISED}


class CountedDevice:
    """Streams of a device that computes a pass in a set time, and the host's clock beside it."""

    def __init__(self, device_s: float) -> None:
        self.host_s = self.free_s = 0.0
        self.gaps_s: list[float] = []
        self._device_s = device_s

    def stream(self, name: str) -> HostStream:
        """See DeviceStreams."""
        return _CountedStream(self)

    def compute(self) -> None:
        """Begin a pass as soon as the device is free and the host has launched it."""
        begun_s = max(self.free_s, self.host_s)
        self.gaps_s.append(begun_s - self.free_s)
        self.free_s = begun_s + self._device_s


class _CountedEvent:
    def __init__(self, device: CountedDevice) -> None:
        self._device, self._at_s = device, device.free_s

    def is_done(self) -> bool:
        return self._device.host_s >= self._at_s

    def synchronize(self) -> None:
        self._device.host_s = max(self._device.host_s, self._at_s)


class _CountedStream(HostStream):
    def __init__(self, device: CountedDevice) -> None:
        self._device = device

    @override
    def record(self) -> Any:
        return _CountedEvent(self._device)


class CountedEngine(Engine):
    """An engine whose passes take their time on a CountedDevice."""

    def __init__(self, device: CountedDevice, **options: Any) -> None:
        self._counted = device
        super().__init__(streams=device, **options)

    @override
    def _compute_step(self, launch: StepLaunch) -> None:
        super()._compute_step(launch)
        self._counted.compute()


@dataclass(slots=True)
class Run:
    """Sequences of one engine, each with a block more whenever it needs one."""

    engine: Engine
    num_tokens: list[int]
    free: list[BlockId]

    @classmethod
    def of(cls, make: Callable[..., Engine], sampling: SamplingParams, num_steps: int, **options: Any) -> "Run":
        """Begin it behind prompts of different lengths."""
        config = replace(LLAMA_0_5B, num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, head_dim=32)
        config = replace(config, embedding_size=64, vocab_size=VOCABULARY, rope=RopeConfig(rotary_dim=32))
        max_context_len = CONTEXT_LEN + num_steps + NUM_ROWS
        count = NUM_ROWS * (max_context_len // BLOCK_SIZE + 2)
        storage = BlockStorage(config.block_layout(BLOCK_SIZE, "float32"), count)
        storage.zero_blocks(np.arange(count))
        decoder = Decoder(config, random_weights(config, 0, torch.float32))
        sizes = {"max_sequences": NUM_ROWS, "max_context_len": max_context_len}
        own = cls(make(model=decoder, storage=storage, **sizes, **options), [], [])
        own.free = [BlockId(block) for block in range(count - NUM_ROWS)]
        for row in range(NUM_ROWS):
            length = CONTEXT_LEN + row
            blocks = tuple(own.free.pop() for _ in range(-(-length // BLOCK_SIZE)))
            tokens = tuple((7 * row + place) % VOCABULARY for place in range(length))
            own.engine.add_sequence(NewSequence(RequestId(f"r{row}"), tokens, length, length - 1, blocks, sampling))
            own.num_tokens.append(length)
        return own

    def step(self) -> bool:
        """Compute the next token of each; return whether that was launched ahead."""
        for row, count in enumerate(self.num_tokens):
            if (count - 1) % BLOCK_SIZE == 0 and count > CONTEXT_LEN + row:
                self.engine.append_blocks(RequestId(f"r{row}"), [self.free.pop()])
        output = self.engine.execute([StepSlice(RequestId(f"r{row}"), 1) for row in range(NUM_ROWS)])
        self.num_tokens = [count + 1 for count in self.num_tokens]
        return bool(getattr(output.times, "is_ahead", False))


def on_device(sampling: SamplingParams, num_lent: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return gaps and shares of steps on a stand-in; `num_lent`: -1: nothing is launched ahead."""
    device = CountedDevice(arguments.device_ms / 1e3)

    def make(**options: Any) -> Engine:
        total = options["storage"].num_blocks
        lent = [BlockId(total - 1 - index) for index in range(num_lent)]
        return CountedEngine(device, launches_ahead=num_lent >= 0, lent_blocks=lent, **options)

    run, sent = Run.of(make, sampling, arguments.steps), []

    def noted(arrays: list[Array], where: torch.device) -> list[Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, where)

    are_ahead = []
    with patch.object(logits_processors, "to_device", noted):
        for _ in range(arguments.steps):
            device.host_s += arguments.host_ms / 1e3
            are_ahead.append(run.step())
    gaps = device.gaps_s[1:]
    return {
        "share_launched_ahead": statistics.mean(are_ahead[1:]),
        "gap_ms_median": statistics.median(gaps) * 1e3,
        "gap_ms_mean": statistics.mean(gaps) * 1e3,
        "bytes_for_penalties_median": statistics.median(sent[1:]) if len(sent) > 1 else 0.0,
    }


def step_ms(sampling: SamplingParams, num_steps: int) -> float:
    """Return the median milliseconds of processor time of this CPU's steps, on one thread."""
    run, seconds = Run.of(Engine, sampling, num_steps), []
    for _ in range(num_steps):
        started = time.process_time()
        run.step()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds) * 1e3


def answer_rounds(num_steps: int) -> None:
    """Measure once for each line of the input, and answer with a line of JSON."""
    torch.set_num_threads(1)
    for _ in sys.stdin:
        print(json.dumps({kind: step_ms(sampling, num_steps) for kind, sampling in KINDS.items()}), flush=True)


def against(before: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of steps of both checkouts, in turn, and the median of their ratios."""
    folders = {"before": before, "now": Path(__file__).resolve().parents[2]}
    command = [sys.executable, str(Path(__file__).resolve()), "--cpu", "--steps", str(arguments.steps)]
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in folders} for kind in KINDS}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": str(folder)},
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name, folder in folders.items()
        }
        for number in range(arguments.rounds):
            for name in sorted(workers, reverse=number % 2 > 0):  # each goes first as often
                _measure(workers[name], {kind: own[name] for kind, own in found.items()})
    ratios = {
        kind: statistics.median(now / then for then, now in zip(own["before"], own["now"], strict=True))
        for kind, own in found.items()
    }
    return {"step_ms": found, "ratio": ratios, "load": os.getloadavg()}


def _measure(worker: "subprocess.Popen[str]", found: dict[str, list[float]]) -> None:
    assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018
    worker.stdin.write("\n")
    worker.stdin.flush()
    for kind, value in json.loads(worker.stdout.readline()).items():
        found[kind].append(value)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=8.0, help="of a pass")
    parser.add_argument("--host-ms", type=float, default=1.0, help="of the host, for each step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--cpu", action="store_true", help="measure this CPU's steps for each line of the input")
    arguments = parser.parse_args()
    if arguments.cpu:
        answer_rounds(arguments.steps)
        return
    from benchmarks.support.recording import write_result  # another checkout may run this file

    if arguments.before is not None:
        figures = against(arguments.before, arguments)
        print(figures["ratio"])
        sizes = f"--rounds {arguments.rounds} --steps {arguments.steps}"
        command = f"python -m benchmarks.engine.steps_ahead --before FOLDER {sizes}"
        print(write_result("steps_ahead_cpu", figures, command=command))
        return
    ways = {"none": -1, "with_room_alone": 0, "with_lent_blocks": NUM_ROWS}
    cases = {
        kind: {way: on_device(sampling, num_lent, arguments) for way, num_lent in ways.items()}
        for kind, sampling in KINDS.items()
    }
    print(json.dumps(cases, indent=2))
    set_times = {"device_ms": arguments.device_ms, "host_ms": arguments.host_ms, "steps": arguments.steps}
    print(write_result("steps_ahead", {"rows": NUM_ROWS, "block_size": BLOCK_SIZE, **set_times, "cases": cases}))


if __name__ == "__main__":
    main()

"""Random histories of requests on two GPUs of the fake CUDA: `python -m tests.harnesses.cuda_schedules --count 10000`.

As in `engine_histories`, on the branches that only a GPU takes: streams of PyTorch's, memory that is another's as soon
as nothing holds it, graphs, steps launched ahead, steps between the layers of others, prefixes copied from one request
to another; and workers are killed whose streams still work. Every token is compared with what the CPU engine generates
for the request alone.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.runtime.device.streams import CudaStreams, HostStreams
from alignedserve.runtime.engine.engine import COMPUTE
from alignedserve.runtime.engine.engine_sizes import LAYERS_AHEAD
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.model_executor import PassPace
from alignedserve.runtime.engine.steps import step_passes as cuda_graphs
from alignedserve.runtime.engine.swap_space import SlotSwapSpace, SwapSpace
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weight_files import load_weights
from tests.harnesses.engine_histories import (
    BLOCK_SIZE,
    MAX_CONTEXT_LEN,
    MAX_RUNNING,
    EngineHistory,
    Place,
    Request,
    alone_of_kind,
    undisturbed,
)
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.fake_cuda.small_copies import small_copies
from tests.support.models.tiny_llama import TINY_LLAMA

NUM_TURNS = 10
_CONFIG = {**TINY_LLAMA, "vocab_size": 199, "num_key_value_heads": 4}
_PACES = (0.0, 0.3, 0.8)
_ENGINES_OF_MACHINE = 40  # schedules on one machine, whose memory is never given back


def tiny_decoder(device: torch.device | str = "cpu") -> Decoder:
    config = parse_model_config(_CONFIG)
    return Decoder(config, load_weights(None, config, torch.float32, device))


class _Worker(Place):
    """A place of one GPU, as a worker of its own process would be."""

    def __init__(self, decoder: Decoder, arena: Arena | None, rng: random.Random) -> None:
        streams = CudaStreams(decoder.device)
        self.stops_passes = rng.random() < 0.5
        super().__init__(decoder, streams, arena, rng, launches_ahead=True, stops_passes=self.stops_passes)
        self.pace = PassPace(streams.stream(COMPUTE), LAYERS_AHEAD)
        host_bytes = rng.choice((0, 1 << 14))
        if rng.random() < 0.4:
            self.swap_space = SlotSwapSpace(self.storage, streams, host_bytes=host_bytes)
            self.has_whole_swaps = False
        else:
            self.swap_space = SwapSpace(self.storage, streams, host_bytes=host_bytes)
        if rng.random() < 0.1:
            self.engine.record_graphs()

    @override
    def iterate(self) -> None:
        torch.cuda.set_device(self.storage.device)
        super().iterate()

    @override
    def compute(self, chosen: Mapping[Request, int]) -> None:
        self.pace.begin(self._random.choice((1, 1 << 10)))
        super().compute(chosen)

    def end(self, fake: FakeCuda) -> None:
        """End its process: what it has enqueued is not done, and the driver forgets the memory that it knows of it.

        Else the next worker's memory may lie where a former one's did, in two registrations.
        """
        with fake.machine.killed(self.storage.device.index):
            rows = self.swap_space._host_rows
            if rows is not None:
                rows._registered.close()


class CudaSchedule(EngineHistory):
    """One history. The same seed gives the same one."""

    def __init__(self, fake: FakeCuda, decoders: list[Decoder], seed: int, folder: Path) -> None:
        self._fake = fake
        self._decoders = decoders
        self._lost: list[Request] = []
        self.seen: Counter[str] = Counter()
        fake.machine.random.seed(seed)
        fake.machine.pace = random.Random(seed).choice(_PACES)
        super().__init__(decoders[0], lambda _: HostStreams(), seed, folder, launches_ahead=True)

    @override
    def _make_place(self, number: int) -> Place:
        decoder = self._decoders[number]
        torch.cuda.set_device(decoder.device)
        worker = _Worker(decoder, self._arena, self._random)
        if worker.stops_passes:
            decoder.stop_for(partial(self._between_layers, worker))
        return worker

    @override
    def _actions(self) -> dict[Callable[[Place], None], int]:
        own = {self._on_device(action): weight for action, weight in super()._actions().items()}
        return {**own, self._on_device(self._copy_prefix): 4, self._on_device(self._kill): 1}

    def _between_layers(self, worker: _Worker) -> None:
        """Compute requests that are not in the pass in progress, one of them new, before its next layer."""
        if not worker.engine.may_stop or not worker.computing:
            return
        worker.pace.layer_launched()
        if self._random.random() < 0.5 or any(request.is_hidden for request in worker.computing):
            return
        outer = worker.computing
        self._start(worker)
        for request in [*worker.running]:
            computed, known = worker.engine.num_computed(request.request_id), len(request.tokens)
            if request in outer or request.is_hidden or known >= MAX_CONTEXT_LEN or self._random.random() < 0.3:
                continue
            if worker.make_room(request, known):
                worker.computing = ()  # within it, none comes
                worker.compute({request: known - computed})
                worker.computing = outer
                self.seen["steps within others"] += 1

    def end(self) -> None:
        """End the workers' processes."""
        for decoder in self._decoders:
            decoder.stop_for(lambda: None)
        for place in self._places:
            assert isinstance(place, _Worker), "a place without a GPU"
            place.end(self._fake)

    def _on_device(self, action: Callable[[Place], None]) -> Callable[[Place], None]:
        """Make a place's device the current one first, as it always is in a worker's process."""

        def act(place: Place) -> None:
            torch.cuda.set_device(place.storage.device)
            action(place)

        return act

    @override
    def _start(self, place: Place) -> None:
        """Start a request, or again one that was on a lost worker."""
        if not self._lost or len(place.running) == MAX_RUNNING:
            super()._start(place)
            return
        request = self._lost.pop()
        request.blocks, request.num_computed = [], 0
        place.run(request)

    def _copy_prefix(self, place: Place) -> None:
        """Start a request whose prompt is another's tokens so far, with copies of its full blocks."""
        num_computed = place.engine.num_computed
        able = [one for one in place.running if not one.is_hidden and num_computed(one.request_id) >= BLOCK_SIZE]
        if not able or len(place.running) == MAX_RUNNING:
            return
        other = self._random.choice(able)
        count = min(num_computed(other.request_id), len(other.tokens) - 1) // BLOCK_SIZE
        blocks = place.take(count)
        if blocks is None:
            return
        place.engine.write_blocks(blocks, place.engine.read_blocks(other.blocks[:count]))
        request = Request(RequestId(f"r{len(self.requests)}"), other.kind, [*other.tokens], count * BLOCK_SIZE, blocks)
        self.requests.append(request)
        place.run(request)
        self.seen["copied prefixes"] += 1

    def _kill(self, place: Place) -> None:
        """End a worker's process as it is, and start another in its place."""
        if self._random.random() < 0.7:
            return
        assert isinstance(place, _Worker), "a place without a GPU"
        number = self._places.index(place)
        place.end(self._fake)
        self._lost += [*place.running, *place.swapped]
        self._places[number] = self._make_place(number)
        self.seen["kills"] += 1


class _Alone(dict[int, list[int]]):
    """What each kind of request generates alone, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = tiny_decoder()

    def __missing__(self, kind: int) -> list[int]:
        self[kind] = alone_of_kind(self._decoder, lambda _: HostStreams(), kind)
        return self[kind]


@contextlib.contextmanager
def schedules_machine(seed: int) -> Iterator[tuple[FakeCuda, list[Decoder]]]:
    """Yield a fake CUDA of two GPUs, with the model on each. Under every other seed blocks are copied by lists."""
    are_listed = None if seed // _ENGINES_OF_MACHINE % 2 else True
    with (
        fake_cuda(seed, num_devices=2) as fake,
        quick_kernels(),
        mock.patch.object(cuda_graphs, "_WARM_UPS", 1),
        small_copies(are_listed=are_listed),
    ):
        yield fake, [tiny_decoder(torch.device("cuda", number)) for number in range(2)]


def run_schedules(first: int, count: int) -> tuple[list[int], Counter[str]]:
    """Return the seeds of schedules in which an answer is another, or that fail, and what happened in all."""
    alone = _Alone()
    wrong: list[int] = []
    seen: Counter[str] = Counter()
    for begin in range(first, first + count, _ENGINES_OF_MACHINE):
        with schedules_machine(begin) as (fake, decoders):
            for seed in range(begin, min(begin + _ENGINES_OF_MACHINE, first + count)):
                wrong += [] if _holds(fake, decoders, seed, alone, seen) else [seed]
            counts = fake.machine.counts
            seen.update(
                launches=counts.launches,
                kernels=counts.kernels,
                copies=counts.copies,
                waits=counts.synchronisations,
                captures=counts.captures,
                replays=counts.replays,
                frees=fake.memory.num_freed,
            )
    return wrong, seen


def _holds(fake: FakeCuda, decoders: list[Decoder], seed: int, alone: _Alone, seen: Counter[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        schedule = CudaSchedule(fake, decoders, seed, Path(folder))
        try:
            schedule.run(NUM_TURNS)
        except (AssertionError, RuntimeError):  # such as an index that is none, which ends a process
            traceback.print_exc()
            fake.machine.failure = None
            return False
        finally:
            schedule.close()
            schedule.end()  # the workers' processes, before their memory is another's
    seen.update(schedule.seen)
    seen["tokens"] += sum(len(request.tokens) - request.prompt_len for request in schedule.requests)
    return undisturbed(schedule.requests, alone)


def main() -> int:
    """Run schedules and print what they showed; 1: an answer was another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--count", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    wrong, seen = run_schedules(arguments.first, arguments.count)
    print(f"{arguments.count} schedules from {arguments.first} on in {time.perf_counter() - began:.0f} s: {dict(seen)}")
    print(f"with another answer than the CPU engine's: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

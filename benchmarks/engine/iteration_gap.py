"""Decode worker: time between two forward passes, with real links and a real peer process.

A colocated worker serves 64 requests of a peer that plays router and gateway in a process of its own. What is
measured is from the end of one forward pass (logits included) to the beginning of the next: sampling, finishing,
admitting, block tables, tokens handed to the gateway, the next batch prepared.

    python -m benchmarks.engine.iteration_gap  # target: at most 1 ms in the median, whatever the context length
"""

import asyncio
import itertools
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from alignedserve.config.sections import DecodeWorkerConfig, SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.gateways import TokensEmitted
from alignedserve.messages.handshake import Ping, Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.messages.workers import (
    IterationLogReport,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.process.addresses import AddressBook
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.worker_core.iteration_log import IterationLog
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from decode_worker.colocated.service import ColocatedWorker
from decode_worker.factory import make_colocated_logic, memory_of

SECRET = b"b" * 32
NUM_REQUESTS = 64
NUM_TOKENS = 200
PROMPT_LENS = (16, 1500)
POCKET_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class PeerProcess:
    """Router and gateway in one: hands out requests, takes tokens, notes when all are done."""

    def __init__(self, folder: Path, prompt_len: int) -> None:
        self._folder = folder
        self._prompt_len = prompt_len
        self._num_left = NUM_REQUESTS
        self._done = asyncio.Event()
        union = (
            TokensEmitted
            | WorkerRegistered
            | PrefillCompleted
            | RequestFinished
            | WorkerLoad
            | IterationLogReport
            | Ping
        )
        self._board = LinkManager(Identity(Role.ROUTER, "router", SECRET), Codec(union), self)

    async def run(self) -> None:
        await self._board.listen(f"unix:{self._folder}/router.sock")
        async with asyncio.timeout(600):
            await self._done.wait()

    def on_linked(self, peer: Peer) -> None:
        """Handle the link's event (see LinkHandler)."""

    def on_lost(self, peer: Peer) -> None:
        """Handle the link's event (see LinkHandler)."""

    def on_message(self, peer: Peer, message: Message) -> None:
        match message:
            case WorkerRegistered():
                for number in range(NUM_REQUESTS):
                    self._board.send(peer.name, PrefillRequest(self._request(number), number + 1))
            case RequestFinished():
                self._num_left -= 1
                if self._num_left == 0:
                    self._done.set()

    def _request(self, number: int) -> Request:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = tuple((number + position) % 4000 for position in range(self._prompt_len))
        # The worker has one link to this process, so its tokens come over the same socket.
        address = f"unix:{self._folder}/router.sock"
        return Request(RequestId(f"r{number}"), prompt, sampling, address, time.monotonic())


def play_peer(folder: Path, prompt_len: int) -> None:
    uvloop.run(_play(folder, prompt_len))


async def _play(folder: Path, prompt_len: int) -> None:
    await PeerProcess(folder, prompt_len).run()


def measure(prompt_len: int) -> list[float]:
    """Return the seconds between forward passes while all requests decode."""
    stamps, _ = serve_peer(prompt_len)
    return [
        after[0] - before[1]
        for before, after in itertools.pairwise(stamps)
        if before[2] == after[2] == NUM_REQUESTS  # both passes are decodes of the whole batch
    ]


def serve_peer(prompt_len: int) -> tuple[list[tuple[float, float, int]], IterationLog]:
    """Serve one peer process; (begin, end, tokens) of every forward pass, and the worker's own iteration log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer = multiprocessing.get_context("spawn").Process(target=play_peer, args=(folder, prompt_len))
        peer.start()
        return uvloop.run(_serve(folder, peer))


async def _serve(folder: Path, peer: Any) -> tuple[list[tuple[float, float, int]], IterationLog]:
    served = ServedModel("pocket-shape", folder, parse_model_config(POCKET_SHAPE), "float32", 2048, True)
    executor = ModelExecutor(served, EngineSizes(1 << 30, NUM_REQUESTS, 16))
    stamps = _stamp_forward_passes(executor)
    registered = WorkerRegistered(executor.num_blocks, 16, NUM_REQUESTS, "", can_prefill=True, can_decode=True)
    config = DecodeWorkerConfig(max_running_requests=NUM_REQUESTS, max_num_batched_tokens=2048, swap_space_bytes=0)
    address_book = AddressBook(folder)
    process_spec = ProcessSpec(Role.DECODE_WORKER, "decode-0", "bench", SECRET, 60.0, address_book, folder)
    make = partial(
        make_colocated_logic,
        registered=registered,
        memory=memory_of(config, executor.layout, num_blocks=executor.num_blocks),
        config=config,
        scheduling=SchedulingConfig(policy="fcfs"),
        eos_token_ids=executor.eos_token_ids,
    )
    worker = ColocatedWorker(make=make, executor=executor, process_spec=process_spec)
    await worker.start(router_at=f"unix:{folder}/router.sock")
    await asyncio.to_thread(peer.join)
    await worker.close()
    return stamps, worker.iteration_log


def _stamp_forward_passes(executor: ModelExecutor) -> list[tuple[float, float, int]]:
    model: Any = executor._engine.model
    forward, logits, decode, decode_highest = model.forward, model.logits, model.decode, model.decode_highest
    stamps: list[tuple[float, float, int]] = []

    def stamped_forward(batch: Any, storage: Any) -> Any:
        begin = time.perf_counter()
        hidden = forward(batch, storage)
        stamps.append((begin, time.perf_counter(), hidden.shape[0]))
        return hidden

    def stamped_logits(hidden: Any) -> Any:
        result = logits(hidden)
        begin, _, num_tokens = stamps[-1]
        stamps[-1] = (begin, time.perf_counter(), num_tokens)
        return result

    def stamped_decode(batch: Any, storage: Any) -> Any:
        begin = time.perf_counter()
        result = decode(batch, storage)
        if result is not None:  # else `forward` and `logits` follow
            stamps.append((begin, time.perf_counter(), result.shape[0]))
        return result

    def stamped_highest(batch: Any, storage: Any, allowed: Any = None) -> Any:
        begin = time.perf_counter()
        result = decode_highest(batch, storage, allowed)
        if result is not None:  # else one of those above follows
            stamps.append((begin, time.perf_counter(), len(result.token_ids)))
        return result

    model.forward, model.logits = stamped_forward, stamped_logits
    model.decode, model.decode_highest = stamped_decode, stamped_highest
    return stamps


def main() -> None:
    """Measure at short and long contexts; print and record."""
    parser = parser_of(__doc__, rounds=3)
    rounds = parser.parse_args().rounds
    rows = []
    for prompt_len in PROMPT_LENS:
        gaps = [gap for _ in range(rounds) for gap in measure(prompt_len)]
        quantiles = statistics.quantiles(gaps, n=100)
        row = {
            "running": NUM_REQUESTS,
            "prompt_len": prompt_len,
            "gaps": len(gaps),
            "p50_ms": round(1e3 * statistics.median(gaps), 3),
            "p90_ms": round(1e3 * quantiles[89], 3),
            "p99_ms": round(1e3 * quantiles[98], 3),
        }
        print(row)
        rows.append(row)
    write_result("engine/iteration_gap", rows)


if __name__ == "__main__":
    main()

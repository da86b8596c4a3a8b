"""What the host does for a step of decodes on a GPU, measured without one.

The engine's own code with the planner of the GPU kernels, recorded steps and steps launched ahead; the model, what a
graph would replay, the sampling kernel and copies of lent slots are stand-ins that compute nothing. So the figures are
of Python, NumPy and PyTorch's calls on a CPU, in the thread's own time on a core; what a driver takes for a copy, a
launch and an event comes on top and cannot be known here. With the worker's own loop: its decisions, commands to the
engine and results back. Left out are the hop between two threads and the link to the gateway. The calls of a step, of
Python's functions and of C's from there, are counted as well: on a busy machine they tell more.

    python -m benchmarks.engine.host_cycle  # target: at most 0.8 ms of 64 x 2 048 and 256 x 1 024
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from alignedserve.config.sections import DecodeWorkerConfig, SchedulingConfig
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.events import PeerConnected, Received
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.workers import PrefillRequest
from alignedserve.process.heap import settle_heap
from alignedserve.runtime.attention.triton_backend import GpuPlanner
from alignedserve.runtime.engine import engine as engine_module
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.model_executor import DeviceTurns, ModelExecutor, UrgentIterations
from alignedserve.runtime.engine.sampling import sampler
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.scheduling.picture_turns import TurnLengths
from alignedserve.worker_core.factory import colocated_registration, make_colocated_logic, memory_of
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from kernels.attention import PLAIN_SCORES

CASES = ((64, 2048), (256, 1024))
BLOCK_SIZE = 16
PROGRAMS = 264  # two on each of an H100's 132 multiprocessors
WARM_UPS, COUNTED_STEPS = 8, 31
_SPARE_BLOCKS = 24  # of each request: for 384 steps
# In the first two all contexts are of one length, and all begin a block in the same step, which medians leave out. In
# the last a sixteenth of them does so in every step, as in service.
GREEDY, RANDOM, SPREAD = KINDS = "greedy", "temperature, top-p", "greedy, contexts of all lengths"
SHAPE = {  # the heads of an 8B Llama, but for their sizes
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


class StandInModel:
    """A decoder that computes nothing."""

    def __init__(self, config: ModelConfig, num_rows: int) -> None:
        self.config, self.dtype, self.dtype_name = config, torch.float32, "float32"
        self.device, self.logits_width, self.has_native_head = torch.device("cpu"), config.vocab_size, False
        self.attention_s = self.chunk_attention_s = 0.0
        self.scores = PLAIN_SCORES
        self._hidden = torch.zeros((num_rows, 1))
        self._logits = torch.zeros((num_rows, config.vocab_size))

    def forward(self, batch: Any, storage: Any) -> Tensor:
        return self._hidden[: len(batch.token_ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]

    def decode(self, batch: Any, storage: Any) -> None:
        return

    def finish_step(self) -> None:
        """Do nothing, as on a GPU."""


class StandInKernels:
    """The sampling kernel, which chooses what has been chosen."""

    MOST_TOKENS = 1 << 18

    def __init__(self, num_rows: int) -> None:
        self._chosen = torch.ones(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.bool)

    def sample_tokens(self, logits: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._chosen[0][: len(logits)], self._chosen[1][: len(logits)]


def replayed(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    result = work()
    return lambda: result


class Parts:
    """Seconds of the parts of steps; a part within another counts for both."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def end_step(self) -> None:
        self.steps.append(dict(self._now))
        self._now.clear()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **more)
            finally:
                self._now[name] += time.thread_time() - started

        return run


class Calls:
    """Calls of functions, Python's and those of C that Python calls."""

    def __init__(self) -> None:
        self.of_steps: list[int] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        number = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.of_steps.append(number)


class Setup(NamedTuple):
    """A worker's engine and its logic, for so many requests."""

    engine: Engine
    executor: ModelExecutor
    logic: Any
    requests: list[Request]


@contextmanager
def stand_ins(num_rows: int) -> Iterator[None]:
    def planner(_name: str, table: Any, storage: BlockStorage, config: ModelConfig, *_: Any) -> GpuPlanner:
        return GpuPlanner(table, storage, None, config.group_size, num_programs=PROGRAMS)

    def fused_kernels(*_: object) -> StandInKernels:
        return kernels

    def copy_nothing(*_: object) -> None:
        return

    kernels = StandInKernels(num_rows)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine_module, "attention_planner", planner))
        stack.enter_context(mock.patch.object(sampler, "fused_kernels", fused_kernels))
        stack.enter_context(mock.patch.object(BlockStorage, "copy_first_slots", copy_nothing))
        yield


def made(num_rows: int, context_len: int, sampling: SamplingParams, *, is_spread: bool) -> Setup:
    config = parse_model_config(SHAPE)
    num_blocks = num_rows * (context_len // BLOCK_SIZE + _SPARE_BLOCKS)
    num_lent = num_rows
    layout = config.block_layout(BLOCK_SIZE, "float32")
    storage = BlockStorage(layout, num_blocks + num_lent, torch.device("cpu"), has_scratch=True)
    model: Any = StandInModel(config, 4 * num_rows * context_len)
    own = range(num_blocks, num_blocks + num_lent)
    options = EngineOptions(max_sequences=num_rows, max_context_len=4096, launches_ahead=True)
    own_blocks = OwnBlocks(lent=[BlockId(block) for block in own])
    engine = Engine(model=model, storage=storage, options=options, own_blocks=own_blocks, capture=replayed)
    executor = ModelExecutor.__new__(ModelExecutor)
    stand_in: Any = executor
    stand_in._engine, stand_in._ranks, stand_in._turns, stand_in._has_axes = engine, None, DeviceTurns(None), False
    stand_in._urgent, stand_in._turn_lengths = UrgentIterations(), TurnLengths()
    nobody_fails: dict[str, Any] = {"failures": lambda ids: {}, "remove": lambda request_id: None}
    stand_in._adapters = mock.Mock(add=lambda request: None, **nobody_fails)
    stand_in._pictures = mock.Mock(add=lambda request, num_cached: None, **nobody_fails)
    decode = DecodeWorkerConfig(
        kv_cache_bytes=1 << 30,
        swap_space_bytes=0,
        max_running_requests=num_rows,
        max_num_batched_tokens=2 * num_rows * context_len,
    )
    logic = make_colocated_logic(
        registered=colocated_registration(layout, num_blocks, decode),
        memory=memory_of(decode, layout, num_blocks=num_blocks),
        config=decode,
        scheduling=SchedulingConfig(policy="fcfs"),
        eos_token_ids=frozenset(config.eos_token_ids),
    )
    prompt = tuple(np.random.default_rng(0).integers(3, 60, context_len + BLOCK_SIZE).tolist())
    lengths = [context_len + (number % BLOCK_SIZE if is_spread else 0) for number in range(num_rows)]
    address = "unix:/none"
    requests = [
        Request(RequestId(f"r{number}"), prompt[:length], sampling, address, 0.0)
        for number, length in enumerate(lengths)
    ]
    return Setup(engine, executor, logic, requests)


def measure(num_rows: int, context_len: int, kind: str, num_steps: int) -> dict[str, Any]:
    """Return the medians of steps in which all requests decode, in milliseconds, and their calls.

    Also the tenth of the steps that was disturbed least.
    """
    counted = calls_of(num_rows, context_len, kind)
    parts = Parts()
    totals = _run(num_rows, context_len, kind, num_steps, parts=parts)
    steps = parts.steps[-num_steps:]
    names = sorted({name for step in steps for name in step})
    medians = {name: _ms([step.get(name, 0.0) for step in steps]) for name in names}
    return {
        "requests": num_rows,
        "context": context_len,
        "sampling": kind,
        "cycle_ms": _ms(totals[WARM_UPS:]),
        "cycle_p10_ms": round(1e3 * float(np.percentile(totals[WARM_UPS:], 10)), 3),
        "calls": counted,
    } | medians


def calls_of(num_rows: int, context_len: int, kind: str) -> int:
    calls = Calls()
    _run(num_rows, context_len, kind, COUNTED_STEPS, calls=calls)
    return round(statistics.median(calls.of_steps[-COUNTED_STEPS:]))


def _run(
    num_rows: int,
    context_len: int,
    kind: str,
    num_steps: int,
    *,
    parts: Parts | None = None,
    calls: Calls | None = None,
) -> list[float]:
    filters = {"temperature": 0.7, "top_p": 0.9, "seed": 1} if kind == RANDOM else {"temperature": 0.0}
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True, **filters)  # type: ignore[arg-type]
    with stand_ins(num_rows), torch.inference_mode():
        setup = made(num_rows, context_len, sampling, is_spread=kind == SPREAD)
        on_event: Callable[..., Any] = setup.logic.on_event
        perform: Callable[..., Any] = partial(ModelExecutor._run, setup.executor)
        if parts is not None:
            _time_parts(setup.engine, parts)
            on_event, perform = parts.timed("decisions", on_event), parts.timed("engine and commands", perform)
        commands = list(on_event(PeerConnected(Role.ROUTER, "router"), 0.0))
        for attempt, request in enumerate(setup.requests):
            commands += on_event(Received("router", PrefillRequest(request, attempt + 1)), 0.0)
        settle_heap()  # as a worker does when it is up: no collection looks at modules
        totals: list[float] = []
        while len(totals) < num_steps + WARM_UPS:
            (command,) = (one for one in commands if isinstance(one, RunIteration))
            is_decode = len(command.slices) == num_rows and all(count == 1 for _, count in command.slices)
            if parts is not None:
                parts.end_step()
            started = time.thread_time()
            with nullcontext() if calls is None else calls.counted():
                completed = perform(command)
                commands = on_event(completed, time.monotonic())
            if is_decode:
                totals.append(time.thread_time() - started)
                if completed.times is not None and len(totals) > WARM_UPS:
                    assert completed.times.is_ahead, "a step that was not launched ahead"
        if parts is not None:
            parts.end_step()
        setup.engine.settle()
    return totals


def _time_parts(engine: Any, parts: Parts) -> None:
    parted: Sequence[tuple[Any, str, str]] = (
        (engine, "execute", "engine"),
        (engine._builder._planner, "plan", "planning of attention"),
        (engine._builder, "build_ahead", "batch, with planning"),
        (engine._passes, "logits", "inputs into the graph"),
        (engine._sampler, "start", "sampling parameters"),
        (engine._next, "take_launched", "taking the step"),
        (engine, "_collect", "collecting tokens"),
    )
    for owner, name, part in parted:
        setattr(owner, name, parts.timed(part, getattr(owner, name)))


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def cases() -> list[tuple[int, int, str]]:
    """Return what is measured: requests, their context and their sampling."""
    return [(*case, kind) for case in CASES for kind in KINDS]


def main() -> None:
    """Measure, print and record under a --name."""
    torch.set_num_threads(1)  # copies to a GPU need no other
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--name", help="of the record, as engine/host_cycle; none is made without")
    options = parser.parse_args()
    rows = []
    for case in cases():
        rows.append(measure(*case, options.steps))
        print(rows[-1], flush=True)
    if options.name:
        write_result(options.name, {"now": rows})


if __name__ == "__main__":
    main()

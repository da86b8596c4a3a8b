"""An urgent iteration runs within the pass in flight, between two layers; and alone where that has ended."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import RequestClass, SamplingParams, TokenLogprob
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device import shared_device
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.device.streams import HostEvent, HostStream
from alignedserve.runtime.engine import engine, model_executor
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import DeviceTurns, ModelExecutor, PassPace, UrgentIterations
from alignedserve.runtime.engine.sampling.sampler import logprob_entries
from alignedserve.runtime.engine.steps import step as step_launch
from alignedserve.runtime.engine.steps import step_passes as prompt_results
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.devices.memory_drivers import StandInCuda
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.fake_cuda.small_copies import small_copies
from tests.support.samples import R1, R2, request

SIZES = EngineSizes(4 << 20, 4, 16, 1)
LONG, SHORT = 600, 20


class Pass:
    """A pass on a thread, with an urgent iteration that waits for the end of its first layer, and others behind it."""

    def __init__(self) -> None:
        self.threads, self.urgent, self.happened = WorkerThreads(), UrgentIterations(), list[str]()

    def add(self, name: str, then: Callable[[str], None] = lambda _: None) -> None:
        """Add an urgent iteration; `then` is called with its report."""
        self.urgent.add(self.threads, lambda: self._iteration(name), then)

    def _iteration(self, name: str) -> str:
        self.urgent.between_layers()  # of its own pass
        self.happened.append(f"{name}, within {self.urgent.is_within}")
        return name

    async def run(self) -> list[str]:
        """Run three layers; return what happened."""
        ended = asyncio.get_running_loop().create_future()
        self.threads.submit("compute", self._layers, ended.set_result)
        await ended
        self.threads.close()
        return self.happened

    def _layers(self) -> None:
        for layer in range(3):
            self.happened.append(f"layer {layer}")
            self.urgent.between_layers()


async def test_it_runs_within_the_pass_and_no_other_within_it() -> None:
    one = Pass()
    one.add("first")
    one.add("second")
    expected = ["layer 0", "first, within True", "second, within True", "layer 1", "layer 2"]
    assert await one.run() == expected
    assert one.urgent.take_stopped_s() > 0.0
    assert one.urgent.take_stopped_s() == 0.0


async def test_what_has_come_meanwhile_does_not_wait_for_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_executor, "_ANSWER_S", 60.0)  # however late the loop hears of the first
    one = Pass()
    one.add("first", then=lambda _: one.add("second"))
    expected = ["layer 0", "first, within True", "second, within True", "layer 1", "layer 2"]
    assert await one.run() == expected


async def test_one_that_comes_too_late_runs_alone() -> None:
    one = Pass()
    one.add("late")
    one.urgent.perform_left()
    assert one.happened == ["late, within False"]
    assert await one.run() == ["late, within False", "layer 0", "layer 1", "layer 2"]
    assert one.urgent.take_stopped_s() == 0.0


@pytest.fixture
async def executor() -> AsyncIterator[ModelExecutor]:
    made = ModelExecutor(resolve_model(ModelSectionConfig()), SIZES)
    yield made
    made.close()


@pytest.fixture
async def on_a_gpu() -> AsyncIterator[ModelExecutor]:
    """Make an executor that stops passes on a GPU of the fake CUDA."""
    with fake_cuda(pace=0.3, device_bytes=1 << 30, driver=StandInCuda(largest=0)), quick_kernels(), small_copies():
        sizes = replace(SIZES, device="cuda:0", stops_passes=True)
        made = ModelExecutor(resolve_model(ModelSectionConfig()), sizes)
        yield made
        made.close()


@pytest.fixture
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of iterations are of their thread alone: parts add up, however often others have its core in between."""
    of_thread = SimpleNamespace(monotonic=time.thread_time, perf_counter=time.thread_time)
    for module in (engine, model_executor, step_launch):
        monkeypatch.setattr(module, "time", of_thread)


def prompt(
    name: str,
    num_tokens: int,
    first_block: int,
    *,
    is_urgent: bool = False,
    request_class: RequestClass = RequestClass.REAL_TIME,
    num_prompt_logprobs: int | None = None,
) -> RunIteration:
    """Return the iteration that computes a whole prompt."""
    tokens = tuple(random.Random(name).randrange(1, 60) for _ in range(num_tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, num_logprobs=2, num_prompt_logprobs=num_prompt_logprobs)
    made = replace(request(name, request_class=request_class), prompt_token_ids=tokens, sampling=sampling)
    block_ids = tuple(BlockId(first_block + index) for index in range(-(-num_tokens // 16)))
    addition = Addition(made, (), block_ids, 0)
    return RunIteration((), (addition,), (), ((RequestId(name), num_tokens),), is_urgent=is_urgent)


@pytest.mark.usefixtures("_without_waits")
async def test_the_tokens_are_the_same_bit_for_bit(executor: ModelExecutor) -> None:
    await look_at_a_chat_within_a_document(executor)


@pytest.mark.usefixtures("_without_waits")
async def test_a_pass_that_is_launched_on_a_gpu_stops_as_well(on_a_gpu: ModelExecutor) -> None:
    await look_at_a_chat_within_a_document(on_a_gpu)


async def test_what_is_told_of_a_prompts_tokens_stands_still_as_well(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, entries, num_sliced = asyncio.get_running_loop(), logprob_entries, 0
    document, chat = prompt("document", LONG, 0, num_prompt_logprobs=3), prompt("chat", SHORT, 40, is_urgent=True)
    expected = [executor.run_iteration(replace_urgent(one)) for one in (document, chat)]
    executor.run_iteration(RunIteration((RequestId("document"), RequestId("chat")), (), (), ()))
    done: asyncio.Queue[IterationCompleted] = asyncio.Queue()

    def sliced(*logits: Any) -> list[TokenLogprob]:
        """Let the chat come behind all layers."""
        nonlocal num_sliced
        num_sliced += 1
        if num_sliced == 1:
            loop.call_soon_threadsafe(executor.start_iteration, chat, done.put_nowait)
            while not executor._urgent._waiting:
                time.sleep(0.001)
        return entries(*logits)

    monkeypatch.setattr(prompt_results, "logprob_entries", sliced)
    executor.start_iteration(document, done.put_nowait)
    short, long = await done.get(), await done.get()
    assert (short.is_urgent, num_sliced) == (True, -(-LONG // 64))
    assert [long.sampled, short.sampled] == [one.sampled for one in expected]
    assert long.prompt_scores == expected[0].prompt_scores


async def look_at_a_chat_within_a_document(executor: ModelExecutor) -> None:
    """Check that each has the tokens that it has alone, and that the chat's come first."""
    document, chat = prompt("document", LONG, 0), prompt("chat", SHORT, 40, is_urgent=True)
    removal = RunIteration((RequestId("document"), RequestId("chat")), (), (), ())
    expected = [executor.run_iteration(replace_urgent(one)).sampled for one in (document, chat)]
    executor.run_iteration(removal)
    loop, done = asyncio.get_running_loop(), list[IterationCompleted]()
    ended = loop.create_future()

    def completed(event: IterationCompleted) -> None:
        done.append(event)
        if len(done) == 2:
            ended.set_result(None)

    executor.start_iteration(document, completed)
    executor.start_iteration(chat, completed)
    await ended
    by_urgency = {event.is_urgent: event for event in done}
    assert [by_urgency[False].sampled, by_urgency[True].sampled] == expected
    long, short = by_urgency[False].times, by_urgency[True].times
    assert long is not None
    assert short is not None
    assert done[0].is_urgent
    assert long.started_s < short.started_s < short.finished_s < long.finished_s
    assert short.computed_s <= long.yielded_s < long.finished_s - long.started_s
    assert long.prepare_s + long.forward_s + long.sampling_s == pytest.approx(long.computed_s, abs=0.005)


def test_a_pass_of_documents_stands_still_for_another_models_chat_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_device, "_POSTED_S", 600.0)  # the chat is waited for as long as the pass takes
    own, other = (SharedDevice.of(tmp_path, "cpu", name, best_effort_share=0.5) for name in ("own", "other"))
    assert other is not None
    executor = ModelExecutor(resolve_model(ModelSectionConfig()), SIZES, shared_device=own)
    document = prompt("document", LONG, 0, request_class=RequestClass.BEST_EFFORT)
    alone = executor.run_iteration(document)
    executor.run_iteration(RunIteration((RequestId("document"),), (), (), ()))
    other.begin(is_real_time=True)
    beside = executor.run_iteration(document)
    executor.close()
    assert beside.sampled == alone.sampled
    assert beside.times is not None
    assert beside.times.yielded_s > 0.2 * beside.times.computed_s  # as long as it computes, by its share


def replace_urgent(command: RunIteration) -> RunIteration:
    """Return the same iteration, to be run by itself."""
    return RunIteration(command.removals, command.additions, command.extensions, command.slices)


class Layer(HostEvent):
    """Notes that somebody has waited for the end of a layer."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self._number, self._waited = number, waited

    @override
    def synchronize(self) -> None:
        self._waited.append(self._number)


class Queue(HostStream):
    """Numbers the events of a stream, and notes which of them somebody has waited for."""

    def __init__(self) -> None:
        self.num_recorded, self.waited = 0, list[int]()

    @override
    def record(self) -> HostEvent:
        self.num_recorded += 1
        return Layer(self.num_recorded - 1, self.waited)


def test_a_long_pass_is_launched_a_few_layers_ahead_and_a_short_one_at_once() -> None:
    queue = Queue()
    pace = PassPace(queue, 2)
    for num_tokens in (16, 4096):
        pace.begin(num_tokens)
        for _ in range(6):
            pace.layer_launched()
    assert queue.num_recorded == 6
    assert queue.waited == [0, 1, 2, 3]


class Device:
    """A shared device that notes which iterations are said to be waited for."""

    def __init__(self) -> None:
        self.urgent: list[bool] = []

    def begin(self, *, is_real_time: bool, has_prompt: bool, may_stop: bool) -> None:
        self.urgent.append(is_real_time)

    def end(self, *, is_real_time: bool) -> None:
        pass


def iteration(*of: RequestId, added: tuple[str, ...] = (), removed: tuple[RequestId, ...] = ()) -> RunIteration:
    additions = tuple(
        Addition(
            request(name, request_class=RequestClass.REAL_TIME if name == "r1" else RequestClass.BEST_EFFORT), (), (), 0
        )
        for name in added
    )
    return RunIteration(removed, additions, (), tuple((one, 1) for one in of))


def urgent(*commands: RunIteration) -> list[bool]:
    device = Device()
    turns = DeviceTurns(cast("SharedDevice", device))
    for command in commands:
        with contextlib.ExitStack() as stack:
            stack.enter_context(turns.taken_for(command))
    return device.urgent


def test_iterations_with_a_real_time_request_are_urgent_until_it_leaves() -> None:
    assert urgent(
        iteration(R1, R2, added=("r1", "r2")), iteration(R2), iteration(R1), iteration(R2, removed=(R1,))
    ) == [True, False, True, False]


def test_a_later_attempt_that_takes_the_place_of_an_earlier_one_is_urgent_as_well() -> None:
    first, again = iteration(R1, added=("r1",)), iteration(R1, added=("r1",), removed=(R1,))
    assert urgent(first, again, iteration(R1)) == [True, True, True]

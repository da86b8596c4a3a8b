"""Runs single steps of the engine on a GPU that only counts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import HostStream
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.weights.weight_loader import assemble_weights, leave_rounded_rows_unwritten
from benchmarks.gpu.ledger.counted_gpu import CountedGpu
from benchmarks.gpu.ledger.forms import GPU, EmptySource, ModelForm, StepForm
from benchmarks.gpu.ledger.kernel_bytes import Launch
from benchmarks.gpu.ledger.ledger import LedgerStep, between, kernels_of
from benchmarks.gpu.ledger.request_parts import AllAllowed, empty_adapter

_BLOCK_SIZE, _SPARE = 16, 8
_GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
_WARM_UPS = 2  # steps of decodes, by which the graph is recorded and the next step is launched ahead


class CountedStep(NamedTuple):
    """What one step asks of a GPU."""

    launches: list[Launch]
    num_idle_waits: int  # of the host, for work behind which nothing was queued
    num_covered_waits: int  # of the host, while the next step is computed
    num_host_reads: int  # values read from the GPU, each of which waits for it
    num_recorded: int  # of the launches, those that a graph replays


class _Event:
    def __init__(self, gpu: "_Counter") -> None:
        self._gpu, self._at = gpu, gpu.num_launched

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None:
        is_covered = self._gpu.num_launched > self._at
        self._gpu.num_covered_waits += is_covered
        self._gpu.num_idle_waits += not is_covered


class _Stream(HostStream):
    def __init__(self, gpu: "_Counter") -> None:
        self._gpu = gpu

    @override
    def record(self) -> Any:
        return _Event(self._gpu)

    @override
    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        pinned.copy_(rows, non_blocking=True)

    @override
    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        rows.copy_(pinned, non_blocking=True)


class _Counter:
    """DeviceStreams and Capture of a CountedGpu."""

    def __init__(self, device: CountedGpu) -> None:
        self.device = device
        self.num_idle_waits = self.num_covered_waits = self.num_recorded = 0
        self._num_taken = 0

    @property
    def num_launched(self) -> int:
        return self._num_taken + len(self.device.launches)

    def stream(self, name: str) -> _Stream:
        del name
        return _Stream(self)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Note what the work launches; a replay launches the same."""
        first = len(self.device.calls)
        result = work()
        recorded = self.device.calls[first:]

        def replay() -> Tensor:
            for call in recorded:
                self.device.note(call)
            self.num_recorded += len(recorded)
            return result

        return replay

    def take(self) -> CountedStep:
        device = self.device
        counts = (self.num_idle_waits, self.num_covered_waits, device.num_host_reads, self.num_recorded)
        step = CountedStep(list(device.launches), *counts)
        self._num_taken += len(device.launches)
        device.launches.clear()
        device.calls.clear()
        self.num_idle_waits = self.num_covered_waits = device.num_host_reads = self.num_recorded = 0
        return step


def count_model(form: ModelForm, steps: tuple[StepForm, ...]) -> dict[str, LedgerStep]:
    """Return the steps of a model, by name: its layers are alike, so that two tell of them all."""
    one, two = (count_steps(replace(form, config=replace(form.config, num_layers=layers)), steps) for layers in (1, 2))
    return {name: _of_layers(form.config.num_layers, one[name], two[name]) for name in one}


def _of_layers(layers: int, one: CountedStep, two: CountedStep) -> LedgerStep:
    first = kernels_of(one.launches)
    layer = between(first, kernels_of(two.launches))
    waits = (two.num_idle_waits, two.num_covered_waits)
    reads = one.num_host_reads + (layers - 1) * (two.num_host_reads - one.num_host_reads)
    recorded = one.num_recorded + (layers - 1) * (two.num_recorded - one.num_recorded)
    return LedgerStep(layers, *waits, reads, recorded, first=first, layer=layer)


def count_steps(form: ModelForm, steps: tuple[StepForm, ...]) -> dict[str, CountedStep]:
    device = CountedGpu()
    with device.used(), torch.inference_mode(), mock.patch.object(triton_backend, "installed_libraries", _no_libraries):
        engine, counter = _engine(form, steps, device)
        requests = _Requests(engine, form)
        _counted(requests, counter, StepForm("tries what kernels can be launched", 0, 0, prompt_len=2))
        return {step.name: _counted(requests, counter, step) for step in steps}


def _no_libraries(*_: Any) -> list[Any]:
    return []


def _engine(form: ModelForm, steps: tuple[StepForm, ...], device: CountedGpu) -> tuple[Engine, _Counter]:
    config = form.config
    dtype = torch_dtype(config.dtype)
    source = EmptySource(form, dtype)
    weights = assemble_weights(config, source)
    if not form.num_adapters:
        leave_rounded_rows_unwritten(weights, config)
    decoder = Decoder(config, weights)
    num_blocks = max(step.num_decodes * blocks_for(step.context_len + _SPARE, _BLOCK_SIZE) for step in steps)
    num_blocks += max(blocks_for(step.prompt_len + _SPARE, _BLOCK_SIZE) for step in steps)
    storage = BlockStorage(
        config.block_layout(_BLOCK_SIZE, form.cache or config.dtype), num_blocks, GPU, has_scratch=True
    )
    counter = _Counter(device)
    longest = max(max(step.prompt_len, step.context_len) for step in steps) + 64
    engine = Engine(
        model=decoder,
        storage=storage,
        options=EngineOptions(
            max_sequences=max(step.num_decodes + bool(step.prompt_len) for step in steps), max_context_len=longest
        ),
        streams=counter,
        capture=counter.capture,
        masks=AllAllowed(config.vocab_size) if form.has_grammar else None,
    )
    return engine, counter


class _Requests:
    """Adds requests of a form to an engine."""

    def __init__(self, engine: Engine, form: ModelForm) -> None:
        self.engine = engine
        self._adapters = [empty_adapter(form.config, engine.model.dtype) for _ in range(form.num_adapters)]
        self._added: list[RequestId] = []
        self._num_blocks = 0

    def add(self, length: int, num_cached: int) -> RequestId:
        place = len(self._added)
        request_id = RequestId(str(place))
        first, self._num_blocks = self._num_blocks, self._num_blocks + blocks_for(length + _SPARE, _BLOCK_SIZE)
        blocks = tuple(map(BlockId, range(first, self._num_blocks)))
        adapter = self._adapters[place % len(self._adapters)] if self._adapters else None
        new = NewSequence(request_id, (1,) * length, length, num_cached, blocks, _GREEDY, adapter=adapter)
        self.engine.add_sequence(new)
        self._added.append(request_id)
        return request_id

    def remove_all(self) -> None:
        for request_id in self._added:
            self.engine.remove_sequence(request_id)
        self.engine.settle()
        self._added, self._num_blocks = [], 0


def _counted(requests: _Requests, counter: _Counter, step: StepForm) -> CountedStep:
    """Run a step on caches that need not have been computed.

    Of steps that are launched ahead the one before it: that is when the GPU is given the next.
    """
    engine, first_len = requests.engine, step.context_len - _WARM_UPS
    slices = [(requests.add(first_len, first_len - 1), 1) for _ in range(step.num_decodes)]
    chunk_len = step.chunk_len or step.prompt_len
    if step.is_ahead and chunk_len:
        slices.append((requests.add(step.prompt_len, step.prompt_len - (_WARM_UPS + 2) * chunk_len), chunk_len))
    for _ in range(_WARM_UPS if slices else 0):
        engine.execute(slices, may_go_on=step.is_ahead)
    if chunk_len and not step.is_ahead:
        slices.append((requests.add(step.prompt_len, step.prompt_len - chunk_len), chunk_len))
    counter.take()
    engine.execute(slices, may_go_on=step.is_ahead)
    counted = counter.take()
    requests.remove_all()
    counter.take()
    return counted

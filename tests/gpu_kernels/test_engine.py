"""The engine as a GPU runs it: kernels that read blocks, decode steps recorded by batch size, each planned ahead."""

import gc
import inspect
import random
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import FP8
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step_passes import graph_sizes
from kernels import gpu_dispatch as gpu_choice
from tests.support.devices.checked_streams import CheckedEvent, CheckedStream, CheckedStreams
from tests.support.devices.host_reads import NoHostReads
from tests.support.marks import slow
from tests.support.models.tiny_engines import (
    GREEDY,
    LogitsProbe,
    TinyEngine,
    capture_nothing,
    random_tokens,
    reference_choices,
    tiny_decoder,
)
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

from alignedserve.runtime.attention import triton_backend
from kernels.gpu.attention import decode_attention

pytestmark = pytest.mark.slow

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do")

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=100)
FILTERED = SamplingParams(temperature=0.7, top_k=5, min_p=0.01, seed=4, max_tokens=100)
CHANGED = SamplingParams(
    temperature=0.7, frequency_penalty=0.4, logit_bias=((5, 2.0),), min_tokens=50, seed=5, max_tokens=100
)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=2, max_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return make_tiny_model(folder, "llama")


@pytest.fixture
def decoder(folder: Path, reference: Any, device: torch.device) -> Decoder:
    return tiny_decoder(folder, device=device)


def engine(decoder: Decoder, **options: Any) -> TinyEngine:
    """A GPU records graphs; elsewhere what would be recorded is done again."""
    return TinyEngine(
        decoder, attention=TRITON, capture=None if decoder.device.type == "cuda" else capture_nothing, **options
    )


@pytest.mark.parametrize("family", ["llama", *slow("mistral_window")])
def test_greedy_generation_equals_transformers(family: str, tmp_path: Path, device: torch.device) -> None:
    reference = make_tiny_model(tmp_path, family)
    tiny = engine(tiny_decoder(tmp_path, device=device))
    prompts = {name: random_tokens(seed, length) for seed, (name, length) in enumerate((("a", 30), ("b", 3), ("c", 1)))}
    for name, prompt in prompts.items():
        tiny.add(name, prompt)
    tiny.step(**{name: len(prompt) for name, prompt in prompts.items()})
    for _ in range(5):
        tiny.step(a=1, b=1, c=1)
    for name, prompt in prompts.items():
        assert len(tiny.tokens(name)) == len(prompt) + 6
        assert tiny.tokens(name)[len(prompt) :] == reference_choices(reference, tiny.tokens(name), len(prompt))


@pytest.mark.slow
@pytest.mark.parametrize("launches_ahead", [False, True])
def test_sequences_that_come_and_go_get_what_they_get_alone(decoder: Decoder, launches_ahead: bool) -> None:
    """Batches of every size, blocks given out token by token, prompts in chunks; parameters of every kind."""
    rng = random.Random(0)
    options = {"launches_ahead": launches_ahead, "num_lent": 9}
    crowd, others = engine(decoder, seed=5, **options), TinyEngine(decoder, attention=TORCH)
    kinds = (GREEDY, SEEDED, PENALISED)
    crowded: dict[str, list[SampledToken]] = {}
    running: dict[str, int] = {}
    for step in range(24):
        if len(running) < 6 and rng.random() < 0.5:
            name = f"r{step}"
            prompt = random_tokens(step, rng.randrange(1, 12))
            for tiny in (crowd, others):
                tiny.add(name, prompt, kinds[step % 3], spare_tokens=40)
            running[name] = len(prompt)
        if not running:
            continue
        slices = {
            name: 1 if left == 1 else rng.randrange(1, left + 1) for name, left in running.items() if rng.random() < 0.9
        }
        if not slices:
            continue
        for token in crowd.step(**slices).sampled:
            crowded.setdefault(token.request_id, []).append(token)
        running = {name: max(1, left - slices.get(name, 0)) for name, left in running.items()}
        if rng.random() < 0.15:
            name = rng.choice(list(running))
            crowd.engine.remove_sequence(RequestId(name))
            del running[name]
    assert sum(map(len, crowded.values())) > 40
    for name, tokens in crowded.items():
        alone = others.generate(name, len(tokens))
        assert [token.token_id for token in tokens] == [token.token_id for token in alone]
        for one, other in zip(tokens, alone, strict=True):
            if one.logprob is not None and other.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("max_sequences", "sizes"), [(3, [1, 2, 3]), pytest.param(9, [1, 2, 4, 8, 9], marks=pytest.mark.slow)]
)
def test_recording_ahead_leaves_the_blocks_alone(decoder: Decoder, max_sequences: int, sizes: list[int]) -> None:
    tiny = engine(decoder, max_sequences=max_sequences)
    assert graph_sizes(max_sequences) == sizes
    before = tiny.storage.bytes.clone()
    tiny.engine.record_graphs()
    assert torch.equal(tiny.storage.bytes, before)
    tiny.add("a", random_tokens(2, 9))
    other = TinyEngine(decoder, attention=TORCH)
    other.add("a", random_tokens(2, 9))
    ids = [[token.token_id for token in made.generate("a", 6)] for made in (tiny, other)]
    assert ids[0] == ids[1]


def capture_by_address(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Keep what a graph keeps: addresses, and not what the work holds."""
    result = work()
    return lambda: result


@interpreted
def test_what_a_recorded_step_uses_lives_as_long(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[weakref.ref[Tensor]] = []
    allocate = decode_attention.decode_batch

    def watched(*args: Any) -> Any:
        batch = allocate(*args)
        used.extend(weakref.ref(part) for part in (batch.sums, batch.weights, batch.lengths))
        return batch

    monkeypatch.setattr(triton_backend, "decode_batch", watched)
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture_by_address, max_sequences=4)
    tiny.engine.record_graphs()
    gc.collect()
    assert len(used) >= 3 * len(graph_sizes(4))
    assert all(part() is not None for part in used)


@pytest.mark.gpu
def test_no_input_of_a_graph_is_freed_before_its_replay(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = torch.cuda.graph
    if "check_input_liveness" not in inspect.signature(graph).parameters:
        pytest.skip(f"PyTorch {torch.__version__} does not check it, 2.13 does")
    monkeypatch.setattr(torch.cuda, "graph", partial(graph, check_input_liveness=True))
    tiny = engine(decoder, max_sequences=4)
    tiny.engine.record_graphs()
    tiny.add("a", random_tokens(2, 9))
    tiny.generate("a", 6)


class CountedStreams(CheckedStreams):
    """Operations see no value of any tensor, and waits of the host are counted."""

    def __init__(self) -> None:
        super().__init__(0)
        self.num_waits = 0

    @override
    def stream(self, name: str) -> CheckedStream:
        stream = super().stream(name)
        if not isinstance(stream, CountedStream):
            stream = self._streams[name] = CountedStream(self)
        return stream


class CountedStream(CheckedStream):
    def __init__(self, streams: CountedStreams) -> None:
        super().__init__(streams)
        self._counted = streams

    @override
    def run(self, operation: Callable[[], object]) -> None:
        def watched() -> None:
            with NoHostReads():  # type: ignore[no-untyped-call]
                operation()

        super().run(watched)

    @override
    def record(self) -> CheckedEvent:
        event, wait = super().record(), CheckedEvent.synchronize

        def counted() -> None:
            self._counted.num_waits += 1
            wait(event)

        event.synchronize = counted  # type: ignore[method-assign]
        return event


@pytest.mark.slow
@interpreted
def test_hidden_caches_beside_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, "llama_mha")
    decoder = tiny_decoder(tmp_path)
    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device: True)
    streams = CountedStreams()
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture_nothing, streams=streams, has_hidden_cache=True)
    tiny.add("a", random_tokens(3, 11), block_tokens=8)
    tiny.add("b", random_tokens(4, 5))
    for slices in ({"a": 4, "b": 5}, {"a": 7}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1, "a": 1}, {"a": 1}):
        before = streams.num_waits
        tiny.step(**slices)
        assert streams.num_waits == before + 1
    monkeypatch.undo()
    plain = TinyEngine(decoder, attention=TORCH)
    for name, seed, length in (("a", 3, 11), ("b", 4, 5)):
        plain.add(name, random_tokens(seed, length))
        plain.generate(name, 4)
        assert tiny.tokens(name) == plain.tokens(name)


@pytest.mark.slow
@interpreted
def test_a_cache_of_float8_by_the_kernels_and_by_pytorch(
    folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whole and in chunks, decodes; keys and values rounded alike by both."""
    probes = []
    for attention, wanted in ((TRITON, True), (TORCH, False)):
        monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device, wanted=wanted: wanted)
        probe = LogitsProbe(tiny_decoder(folder), attention=attention, cache_dtype=FP8)
        for name, count in (("a", 21), ("b", 7)):
            probe.add(name, random_tokens(count, count))
        probe.step(a=9, b=5)
        probe.step(a=10, b=1)
        probe.step(a=1, b=1)
        probe.step(a=1)
        probes.append(probe)
    exact = LogitsProbe(tiny_decoder(folder), attention=TORCH)
    exact.add("a", random_tokens(21, 21))
    exact.step(a=21)
    by_kernels, by_pytorch = (probe.logits("a") for probe in probes)
    size = float(exact.logits("a").abs().max())
    torch.testing.assert_close(by_kernels, by_pytorch, rtol=0.0, atol=2e-3 * size)
    rounding = float((by_pytorch - exact.logits("a")).abs().max()) / size
    assert 1e-4 < rounding < 0.1, "the cache is rounded, and no more than that"
    torch.testing.assert_close(probes[0].logits("b"), probes[1].logits("b"), rtol=0.0, atol=2e-3 * size)


@interpreted
def test_the_host_waits_once_in_a_step_and_reads_nothing_before(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device: True)
    streams = CountedStreams()
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture_nothing, streams=streams)
    for name, sampling in (("a", GREEDY), ("b", SEEDED), ("c", FILTERED), ("d", CHANGED)):
        tiny.add(name, random_tokens(3, 5), sampling)
    prompts, mixed = {"a": 3, "b": 5, "c": 5, "d": 5}, {"a": 2, "b": 1, "c": 1}
    for slices in (prompts, mixed, {"a": 1, "b": 1, "c": 1, "d": 1}, {"c": 1, "a": 1}, {"d": 1, "a": 1}):
        before = streams.num_waits
        tiny.step(**slices)
        assert streams.num_waits == before + 1
    monkeypatch.undo()
    plain = TinyEngine(decoder, attention=TORCH)
    plain.add("a", random_tokens(3, 5))
    assert tiny.tokens("a")[5:] == [token.token_id for token in plain.generate("a", 4)]

"""The engine as a GPU runs it: kernels that read blocks, decode steps recorded by batch size, each planned ahead."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.attention import TORCH, TRITON
from alignedserve.runtime.decode_graphs import graph_sizes, repeat
from alignedserve.runtime.decoder import Decoder
from tests.tiny_engines import GREEDY, TinyEngine, random_tokens, reference_generation, tiny_decoder
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=100)
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
    return TinyEngine(decoder, attention=TRITON, capture=None if decoder.device.type == "cuda" else repeat, **options)


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_greedy_generation_equals_transformers(family: str, tmp_path: Path, device: torch.device) -> None:
    reference = make_tiny_model(tmp_path, family)
    tiny = engine(tiny_decoder(tmp_path, device=device))
    prompts = {name: random_tokens(seed, length) for seed, (name, length) in enumerate((("a", 30), ("b", 3), ("c", 1)))}
    for name, prompt in prompts.items():
        tiny.add(name, prompt)
    tiny.step(**{name: len(prompt) for name, prompt in prompts.items()})
    for _ in range(9):
        tiny.step(a=1, b=1, c=1)
    for name, prompt in prompts.items():
        assert tiny.tokens(name)[len(prompt) :] == reference_generation(reference, prompt, 10)


def test_sequences_that_come_and_go_get_what_they_get_alone(decoder: Decoder) -> None:
    """Batches of every size, blocks given out token by token, prompts in chunks; parameters of every kind."""
    rng = random.Random(0)
    crowd, others = engine(decoder, seed=5), TinyEngine(decoder, attention=TORCH)
    kinds = (GREEDY, SEEDED, PENALISED)
    crowded: dict[str, list[SampledToken]] = {}
    running: dict[str, int] = {}
    for step in range(24):
        if len(running) < 6 and rng.random() < 0.5:
            name = f"r{step}"
            prompt = random_tokens(step, rng.randrange(1, 12))
            for tiny in (crowd, others):
                tiny.add(name, prompt, kinds[step % 3], room=40)
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


def test_a_step_that_was_planned_ahead_is_used(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = engine(decoder)
    for name in "abc":
        tiny.add(name, random_tokens(1, 5))
    tiny.step(a=5, b=5, c=5)
    builder = tiny.engine._builder
    monkeypatch.setattr(builder, "build", lambda *_: pytest.fail("planned anew"))
    tiny.step(c=1, a=1, b=1)  # in any order
    tiny.step(a=1, b=1, c=1)
    monkeypatch.undo()
    expected = engine(decoder, seed=1)
    expected.add("a", random_tokens(1, 5))
    assert tiny.tokens("a") == random_tokens(1, 5) + [token.token_id for token in expected.generate("a", 3)]


def test_recording_ahead_leaves_the_blocks_alone(decoder: Decoder) -> None:
    tiny = engine(decoder, max_sequences=9)
    assert graph_sizes(9) == [1, 2, 4, 8, 9]
    before = tiny.storage.bytes.clone()
    tiny.engine.record_graphs()
    assert torch.equal(tiny.storage.bytes, before)
    tiny.add("a", random_tokens(2, 9))
    other = TinyEngine(decoder, attention=TORCH)
    other.add("a", random_tokens(2, 9))
    ids = [[token.token_id for token in made.generate("a", 6)] for made in (tiny, other)]
    assert ids[0] == ids[1]


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_logits_that_are_not_numbers_fail_their_sequence_alone(decoder: Decoder) -> None:
    tiny = engine(decoder)
    tiny.add("good", random_tokens(1, 6))
    tiny.add("bad", random_tokens(2, 6))
    tiny.step(good=6, bad=6)
    tiny.storage.layer_keys(0)[tiny.blocks["bad"][0]] = float("nan")
    output = tiny.step(good=1, bad=1)
    assert output.failed == [RequestId("bad")]
    assert [token.request_id for token in output.sampled] == [RequestId("good")]
    tiny.engine.remove_sequence(RequestId("bad"))
    assert len(tiny.step(good=1).sampled) == 1

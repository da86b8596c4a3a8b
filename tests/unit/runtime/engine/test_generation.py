"""The engine over tiny models: what it generates, whatever the order of its steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.support.models.tiny_engines import (
    MAX_CONTEXT_LEN,
    TinyEngine,
    random_tokens,
    reference_choices,
    tiny_decoder,
)
from tests.support.models.tiny_models import make_tiny_model

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=100)
A, B = RequestId("a"), RequestId("b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return make_tiny_model(folder, "llama")


@pytest.fixture(scope="module")
def decoder(folder: Path, reference: Any) -> Decoder:
    return tiny_decoder(folder)


@pytest.mark.parametrize(
    "family", ["llama", "opt", "mistral_window", "qwen3", "gpt_neox", "gemma3_text", "mixtral", "phi3", "granite"]
)
def test_greedy_generation_equals_transformers(family: str, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, family)
    tiny = TinyEngine(tiny_decoder(tmp_path))
    prompts = {name: random_tokens(seed, length) for seed, (name, length) in enumerate((("a", 30), ("b", 3), ("c", 1)))}
    for name, prompt in prompts.items():
        tiny.add(name, prompt)
    tiny.step(**{name: len(prompt) for name, prompt in prompts.items()})
    for _ in range(29):
        tiny.step(a=1, b=1, c=1)
    for name, prompt in prompts.items():
        assert len(tiny.tokens(name)) == len(prompt) + 30
        assert tiny.tokens(name)[len(prompt) :] == reference_choices(reference, tiny.tokens(name), len(prompt))


def test_prompt_logprobs_over_chunks(decoder: Decoder, reference: Any) -> None:
    prompt = random_tokens(6, 17)
    tiny = TinyEngine(decoder)
    tiny.add("a", prompt, SamplingParams(temperature=0.0, num_prompt_logprobs=3, num_logprobs=2))
    outputs = [tiny.step(a=count) for count in (5, 1, 11)]
    parts = [part for output in outputs for part in output.prompt_logprobs]
    assert [part.first_position for part in parts] == [1, 6, 7]
    entries = [entry for part in parts for entry in part.entries]
    assert [entry.token_id for entry in entries] == prompt[1:]
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], dim=-1)
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
        top = expected[position].topk(3)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    logprob = outputs[-1].sampled[0].logprob
    assert logprob is not None
    assert logprob.top[0] == (logprob.token_id, logprob.logprob)
    assert not tiny.step(a=1).prompt_logprobs


def test_rows_that_are_not_numbers_fail_alone(folder: Path, reference: Any) -> None:
    decoder = tiny_decoder(folder)
    embedding = decoder._weights.embedding
    assert isinstance(embedding, torch.Tensor)
    embedding[7] = float("nan")
    tiny = TinyEngine(decoder)
    for name, tokens in {"a": [3, 4, 5], "b": [3, 7, 5], "c": [9, 8]}.items():
        tiny.add(name, tokens, SEEDED)
    output = tiny.step(a=3, b=3, c=2)
    assert output.failed == [B]
    assert sorted(token.request_id for token in output.sampled) == ["a", "c"]
    assert tiny.tokens("b") == [3, 7, 5]
    tiny.engine.remove_sequence(B)
    assert len(tiny.step(a=1, c=1).sampled) == 2


def test_a_prompt_fills_the_context_to_its_end(decoder: Decoder) -> None:
    tiny = TinyEngine(decoder)
    tiny.add("a", random_tokens(1, MAX_CONTEXT_LEN - 1), spare_tokens=1)
    tiny.generate("a", 2)
    assert len(tiny.tokens("a")) == MAX_CONTEXT_LEN + 1


def test_bad_calls_are_broken_invariants(decoder: Decoder) -> None:
    tiny = TinyEngine(decoder, max_sequences=1)
    with pytest.raises(AssertionError, match="unknown request"):
        tiny.step(a=1)
    tiny.add("a", [4, 5], spare_tokens=0)
    with pytest.raises(AssertionError, match="more sequences"):
        tiny.add("b", [4, 5])
    with pytest.raises(AssertionError, match="twice"):
        tiny.add("a", [4, 5])
    with pytest.raises(AssertionError, match="beyond the known"):
        tiny.step(a=3)
    with pytest.raises(AssertionError, match="unknown token"):
        tiny.add("c", [4, 199])
    tiny.generate("a", 3)
    with pytest.raises(AssertionError, match="too few blocks"):
        tiny.step(a=1)

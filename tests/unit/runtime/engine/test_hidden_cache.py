"""Sequences whose blocks hold layer inputs generate what they generate with keys and values."""

from collections.abc import Callable
from functools import cache

import pytest

from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.support.models.tiny_engines import BLOCK_SIZE, GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

# Tokens that a block of BLOCK_SIZE slots holds in layer inputs.
BLOCK_TOKENS = {
    "llama_mha": 8,
    "mistral": 6,
    "mistral_window": None,
    "qwen3": 8,
    "gemma3_text": 6,
    "qwen3_moe": None,
    "opt": 8,
    "opt_post_norm": 8,
    "gpt_neox": 8,
    "gpt_neox_serial": 8,
    "llama": None,
    "llama_mqa": None,
}
FAMILIES = [family for family, tokens in BLOCK_TOKENS.items() if tokens is not None]
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=100, num_prompt_logprobs=1)
LENGTHS = {"a": 30, "b": 3, "c": 1, "d": 17}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    @cache
    def decoder(family: str) -> Decoder:
        folder = tmp_path_factory.mktemp(family)
        make_tiny_model(folder, family)
        return tiny_decoder(folder)

    return decoder


@pytest.mark.parametrize("family", BLOCK_TOKENS)
def test_they_are_offered_where_they_are_smaller(family: str, tiny: Callable[[str], Decoder]) -> None:
    config = tiny(family).config
    assert config.hidden_block_tokens(BLOCK_SIZE) == BLOCK_TOKENS[family]


def generated(
    decoder: Decoder, attention: str, hidden: str, block_tokens: int | None
) -> tuple[dict[str, list[int]], list[float]]:
    """Return the tokens of four sequences, those in `hidden` with a hidden cache, prompts in chunks beside decodes,
    and the log-probabilities of a prompt."""
    engine = TinyEngine(decoder, attention=attention, has_hidden_cache=bool(hidden))
    for seed, (name, length) in enumerate(LENGTHS.items()):
        sampling = SEEDED if name == "d" else GREEDY
        own = block_tokens if name in hidden else None
        engine.add(name, random_tokens(seed, length), sampling, spare_tokens=12, block_tokens=own)
    scores = [engine.step(a=7, b=3, c=1).prompt_logprobs, engine.step(b=1, a=13, d=5).prompt_logprobs]
    for _ in range(3):
        engine.step(c=1, b=1)
    scores.append(engine.step(a=10, c=1, d=12, b=1).prompt_logprobs)
    for _ in range(6):
        engine.step(d=1, a=1, b=1, c=1)
    logprobs = [entry.logprob for part in scores for one in part for entry in one.entries]
    assert len(logprobs) == LENGTHS["d"] - 1
    return {name: engine.tokens(name) for name in LENGTHS}, logprobs


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_generate_what_they_generate_with_keys_and_values(
    family: str, attention: str, tiny: Callable[[str], Decoder]
) -> None:
    decoder = tiny(family)
    expected, expected_logprobs = generated(decoder, attention, "", None)
    for hidden in ("a", "bcd", "abcd"):
        found, logprobs = generated(decoder, attention, hidden, BLOCK_TOKENS[family])
        assert found == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_an_engine_without_them_takes_none(tiny: Callable[[str], Decoder]) -> None:
    engine = TinyEngine(tiny("opt"))
    with pytest.raises(AssertionError, match="hidden cache where there is none"):
        engine.add("a", [5, 6], block_tokens=8)

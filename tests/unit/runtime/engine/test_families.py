"""Families whose parts others have too, against transformers: all of it equal, whatever shares a pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.model_files import read_model_config
from tests.support.models.tiny_engines import (
    LogitsProbe,
    TinyEngine,
    random_tokens,
    reference_choices,
    tiny_decoder,
)
from tests.support.models.tiny_models import LATER_FAMILIES, TINY_MODELS, make_tiny_model
from tests.support.models.tiny_vision import TINY_SEEING

PROMPTS = {"a": 41, "b": 7, "c": 22}


@pytest.fixture(scope="module", params=list(LATER_FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny_model(folder, request.param)


def test_logits_equal_transformers_in_every_mixture(made: tuple[Path, Any]) -> None:
    folder, reference = made
    tokens = {name: random_tokens(seed, length) for seed, (name, length) in enumerate(PROMPTS.items())}
    probe = LogitsProbe(tiny_decoder(folder), 4)
    for name, ids in tokens.items():
        probe.add(name, ids)
    probe.step(a=5, b=7)
    probe.step(a=1, c=18)
    probe.step(c=1, a=11)
    for _ in range(3):
        probe.step(a=1, c=1)
    probe.step(a=21)
    for name, ids in tokens.items():
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].double()
        tolerance = 2e-5 * float(expected.abs().max())  # of which both round 1e-5
        torch.testing.assert_close(probe.logits(name).double(), expected, rtol=0.0, atol=tolerance)


def test_answers_and_sizes_equal_those_of_transformers(made: tuple[Path, Any]) -> None:
    folder, reference = made
    assert read_model_config(folder).num_parameters == sum(one.numel() for one in reference.parameters())
    prompt = random_tokens(1, 30)
    tiny = TinyEngine(tiny_decoder(folder))
    tiny.add("a", prompt)
    tiny.generate("a", 10)
    assert len(tiny.tokens("a")) == len(prompt) + 10
    assert tiny.tokens("a")[len(prompt) :] == reference_choices(reference, tiny.tokens("a"), len(prompt))


def test_every_family_is_compared() -> None:
    names = {*TINY_MODELS, *LATER_FAMILIES, *TINY_SEEING}
    # The text parts of some have rows of their own, and transformers has Kimi K2 as deepseek_v3.
    assert set(FAMILIES) - {"gemma3n", "kimi_k2", "qwen3_5", "qwen3_5_moe"} <= names

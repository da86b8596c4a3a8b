"""Sequences whose blocks are filled from their ends give bit for bit what they give in natural order."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import TORCH
from kernels.cpu.native import supported_levels
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

PROMPTS = {"a": random_tokens(1, 150), "b": random_tokens(2, 6), "c": random_tokens(3, 90)}
CACHES = [("float32", None), ("bfloat16", None), ("float32", "int8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    make_tiny_model(folder, "mistral_window")
    return folder


def logits(probe: LogitsProbe, reversed_names: str) -> list[Tensor]:
    for name, tokens in PROMPTS.items():
        probe.add(name, tokens, is_reversed=name in reversed_names)
    probe.step(a=40, b=5, c=37)
    probe.step(b=1, a=70, c=1)
    for _ in range(20):
        probe.step(a=1, c=1)
    return [probe.logits(name) for name in PROMPTS]


@pytest.mark.parametrize("attention", [*supported_levels(), TORCH])
@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
def test_reversed_blocks_change_no_bit(folder: Path, dtype: str, cache_dtype: str | None, attention: str) -> None:
    decoder = tiny_decoder(folder, dtype)
    natural, one, all_of_them = (
        logits(LogitsProbe(decoder, 16, attention, cache_dtype), names) for names in ("", "a", "abc")
    )
    for expected, some, every in zip(natural, one, all_of_them, strict=True):
        assert torch.equal(expected, some)
        assert torch.equal(expected, every)

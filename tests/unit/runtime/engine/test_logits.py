"""Logits of every family against transformers on the same random checkpoint."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import AUTO, TORCH, TRITON
from alignedserve.runtime.engine.forward.decoder import Decoder
from kernels.cpu.native import supported_levels
from kernels.gpu_dispatch import gpu_kernels_available
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import TINY_MODELS, make_tiny_model

pytestmark = pytest.mark.slow

KERNELS = (TORCH, *supported_levels())
HAS_GPU_KERNELS = gpu_kernels_available(torch.device("cpu"))
# Heads, sizes and windows that no other family has as well.
OF_OWN_ATTENTION = ("llama", "llama_mha", "llama_mqa", "mistral", "mistral_window", "qwen2_window", "qwen3")


def runs(first: int, *, of_gpu_kernels: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Every family, each by the next of the kernels from `first` on: three tests have a family by every kernel.

    `of_gpu_kernels`: by a GPU's kernels as well, which take milliseconds for each launch in Triton's interpreter.
    """
    every = [(family, KERNELS[(first + place) % len(KERNELS)]) for place, family in enumerate(TINY_MODELS)]
    every += [(family, TRITON) for family in of_gpu_kernels if HAS_GPU_KERNELS]
    return pytest.mark.parametrize(("case", "attention"), every, indirect=["case"])


class Case(NamedTuple):
    decoders: dict[str, Decoder]  # by dtype
    tokens: dict[str, list[int]]
    expected: dict[str, Tensor]
    in_bfloat16: dict[str, Tensor]  # by transformers


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Every family's is made once, in whatever order tests ask for them."""
    return cache(lambda family: make_case(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=list(TINY_MODELS))
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    return case_of(request.param)


def make_case(family: str, folder: Path) -> Case:
    reference = make_tiny_model(folder, family)
    tokens = {"a": random_tokens(1, 41), "b": random_tokens(2, 7), "c": random_tokens(3, 22)}
    expected = reference_logits(reference, tokens)
    decoders = {dtype: tiny_decoder(folder, dtype) for dtype in ("float32", "bfloat16")}
    return Case(decoders, tokens, expected, reference_logits(reference.to(torch.bfloat16), tokens))


def reference_logits(reference: Any, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: reference(torch.tensor([ids])).logits[0].double() for name, ids in tokens.items()}


def root_mean_square(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


def median_token(difference: Tensor) -> Tensor:
    """Return the row with the median error of difference [tokens, vocab_size]."""
    return difference[difference.square().mean(1).median(0).indices]


def check_float32(probe: LogitsProbe, case: Case) -> None:
    for name, expected in case.expected.items():
        # Sums of some hundred float32 products in another order: a few units in the last place of the largest logit.
        tolerance = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(probe.logits(name).double(), expected, rtol=0.0, atol=tolerance)


def probe_of(case: Case, dtype: str = "float32", block_size: int = 4, attention: str = AUTO) -> LogitsProbe:
    probe = LogitsProbe(case.decoders[dtype], block_size, attention)
    for name, tokens in case.tokens.items():
        probe.add(name, tokens)
    return probe


def run_mixture(probe: LogitsProbe) -> None:
    """Run whole prompts, odd chunks and single tokens, in one pass wherever possible."""
    probe.step(a=5, b=7)
    probe.step(a=1, c=13)
    probe.step(c=1, a=11)
    for _ in range(8):
        probe.step(a=1, c=1)
    probe.step(a=16)


@runs(0, of_gpu_kernels=OF_OWN_ATTENTION)
def test_chunks_and_decodes_in_one_pass(case: Case, attention: str) -> None:
    for block_size in (1, 16):
        probe = probe_of(case, block_size=block_size, attention=attention)
        run_mixture(probe)
        check_float32(probe, case)


@runs(1)
def test_one_token_at_a_time(case: Case, attention: str) -> None:
    probe = probe_of(case, attention=attention)
    for step in range(41):
        probe.step(**{name: 1 for name, tokens in case.tokens.items() if step < len(tokens)})
    check_float32(probe, case)


@runs(2, of_gpu_kernels=OF_OWN_ATTENTION)
def test_bfloat16_is_as_close_as_transformers_in_bfloat16(case: Case, attention: str) -> None:
    """Rounding to 8 bits dominates, so the yardstick is what transformers itself loses in bfloat16, with some room.

    Experts are compared by the median token: where two have nearly the same share, rounding chooses the other one.
    """
    probe = probe_of(case, "bfloat16", attention=attention)
    run_mixture(probe)
    for name, expected in case.expected.items():
        differences = case.in_bfloat16[name] - expected, probe.logits(name).double() - expected
        if case.decoders["bfloat16"].config.experts is not None:
            differences = median_token(differences[0]), median_token(differences[1])
        lost_there, lost_here = (root_mean_square(difference) for difference in differences)
        assert lost_here < 1.3 * lost_there + 1e-3


@runs(0, of_gpu_kernels=sorted(TINY_MODELS.keys() - OF_OWN_ATTENTION))
def test_prompts_in_two_chunks(case: Case, attention: str) -> None:
    probe = probe_of(case, attention=attention)
    probe.step(a=20, b=7, c=21)
    probe.step(a=21, c=1)
    check_float32(probe, case)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_float32_is_as_close_to_float64_as_transformers(family: str, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, family)
    tokens = {"a": random_tokens(1, 41)}
    float32 = reference_logits(reference, tokens)["a"]
    float64 = reference_logits(reference.double(), tokens)["a"]
    probe = LogitsProbe(tiny_decoder(tmp_path))
    probe.add("a", tokens["a"])
    probe.step(a=30)
    for _ in range(11):
        probe.step(a=1)
    assert root_mean_square(probe.logits("a").double() - float64) < 2.0 * root_mean_square(float32 - float64)

"""Use of GPU kernels: a decoder with all of them against the same one without, and what keeps them out."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.core.request import SamplingParams
from kernels import gpu_dispatch as gpu_choice
from kernels.activation import Gated, RmsNorm, gated, rms_norm
from tests.support.marks import slow
from tests.support.models.tiny_engines import GREEDY, LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are compiled take no tensors of a CPU")
# Norms of heads; learned positions, layer norms and no gates; Llama; rotated in part, layers side by side.
# Gemma 3: norms whose weights are more precise than the rows.
FAMILIES = (
    "qwen3",
    *slow("opt", "opt_post_norm", "llama", "gpt_neox", "gemma3_text"),
)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "_can_launch", {})
    monkeypatch.setattr(gpu_choice, "_reasons", {})


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device: True)


def logits(folder: Path, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return tokens of a prompt in two chunks, with another that decodes beside it."""
    probe = LogitsProbe(tiny_decoder(folder))
    for name, own in tokens.items():
        probe.add(name, own)
    probe.step(a=4, b=2)
    probe.step(b=1, a=5)
    return {name: probe.logits(name) for name in tokens}


@interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_computes_the_same_by_the_kernels(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model(tmp_path, family)
    tokens = {"a": random_tokens(1, 9), "b": random_tokens(2, 3)}
    expected = logits(tmp_path, tokens)
    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device: True)
    for packing in ("kernels.linear", "alignedserve.runtime.model.weights.product_reader"):
        monkeypatch.setattr(f"{packing}.packed_levels", lambda dtype, device: ())  # which apply gates themselves
    actual = logits(tmp_path, tokens)
    assert not caplog.records
    gates = {"gating"} if family in ("llama", "qwen3", "gemma3_text") else set()
    assert {name.split()[0] for name in gpu_choice._can_launch} == {"row_norm", "head_placement"} | gates
    for name in tokens:
        tolerance = 1e-5 * float(expected[name].abs().max())
        torch.testing.assert_close(actual[name], expected[name], rtol=0.0, atol=tolerance)


@interpreted
def test_an_engine_draws_the_same_tokens_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded sequences, and one whose penalties make the batch's logits float32."""
    make_tiny_model(tmp_path, "llama")
    kinds = {
        "greedy": GREEDY,
        "seeded": SamplingParams(temperature=0.8, seed=5, max_tokens=100),
        "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=100),
    }

    def generated() -> list[list[int]]:
        tiny = TinyEngine(tiny_decoder(tmp_path))
        for seed, (name, sampling) in enumerate(kinds.items()):
            tiny.add(name, random_tokens(seed, 5), sampling)
        for count in (5, 1, 1, 1, 1):
            tiny.step(**dict.fromkeys(kinds, count))
        return [tiny.tokens(name) for name in kinds]

    expected = generated()
    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda device: True)
    assert generated() == expected
    assert gpu_choice._can_launch["token_sampling (torch.float32)"]


def check_results() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(x), rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(Gated("gelu", x.dtype, CPU)(x), gated(x, "gelu"))


@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler.\nPlease specify it by CC"), OSError(), ImportError("none")]
)
def test_the_reason_is_in_the_log(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def trial() -> None:
        raise error

    assert not gpu_choice.can_launch("attention", trial)
    assert not gpu_choice.can_launch("attention", trial)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "attention" in message
    assert type(error).__name__ in message
    assert (str(error).splitlines() or ["no more is known"])[-1] in message


@pytest.mark.usefixtures("wanted")
def test_without_triton_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.setattr("kernels.activation.native_level", lambda dtype, device: None)
    for _ in range(2):
        check_results()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("Triton is not installed" in message for message in messages)


def test_a_mistake_of_ours_is_no_reason() -> None:
    """An assertion says that the kernel was called wrongly, which plain PyTorch must not hide."""

    def trial() -> None:
        raise AssertionError("of ours")

    with pytest.raises(AssertionError):
        gpu_choice.can_launch("attention", trial)

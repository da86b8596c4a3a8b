"""Every family on a GPU against transformers, prompts in chunks beside decodes; without one, those with own kernels."""

from pathlib import Path

import pytest
import torch

from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.model.weights import feed_forward_weights
from kernels import gpu_dispatch
from tests.support.models.tiny_engines import (
    LogitsProbe,
    TinyEngine,
    capture_nothing,
    random_tokens,
    reference_choices,
    tiny_decoder,
)
from tests.support.models.tiny_models import LATER_FAMILIES, TINY_MODELS, make_tiny_model

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

# What others do not have: sinks, capped scores, contexts cut in chunks, latents, states of three kinds, layers unlike.
OWN = (
    "gpt_oss",
    "gemma2",
    "llama4_text",
    "deepseek_v3",
    "lfm2",
    "qwen3_5_text",
    "granitemoehybrid_dense",
    "gemma3n_text",
    "gemma4_text",
)
OTHERS = [name for name in (*TINY_MODELS, *LATER_FAMILIES) if name not in OWN]
PROMPTS = {"a": 41, "b": 7, "c": 22}


@pytest.mark.parametrize("family", [*OWN, *(OTHERS if torch.cuda.is_available() else ())])
def test_logits_and_answers_equal_transformers(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_tiny_model(tmp_path, family)
    monkeypatch.setattr(gpu_dispatch, "_reasons", {})  # of other tests
    monkeypatch.setattr(feed_forward_weights, "has_experts_apart", lambda _: False)
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda _: True)
    decoder = tiny_decoder(tmp_path, device=device)
    probe = LogitsProbe(decoder, attention=TRITON)
    tokens = {name: random_tokens(seed, length) for seed, (name, length) in enumerate(PROMPTS.items())}
    for name, ids in tokens.items():
        probe.add(name, ids, is_reversed=name == "c")
    for slices in ({"a": 6, "b": 7}, {"a": 1, "c": 13}, {"c": 1, "a": 27}, *[{"a": 1, "c": 1}] * 7, {"c": 1}):
        probe.step(**slices)
    for name, ids in tokens.items():
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].double()
        actual = probe.logits(name).double().cpu()
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))

    capture = None if device.type == "cuda" else capture_nothing
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture)
    prompt, num_tokens = tokens["c"], 24 if device.type == "cuda" else 6
    tiny.add("c", prompt)
    tiny.generate("c", num_tokens)
    assert len(tiny.tokens("c")) == len(prompt) + num_tokens
    assert tiny.tokens("c")[len(prompt) :] == reference_choices(reference, tiny.tokens("c"), len(prompt))
    assert not gpu_dispatch.launch_failures()

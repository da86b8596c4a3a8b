"""Pictures whose tokens read one another both ways, on a GPU: the logits of plain PyTorch, however a prompt is cut."""

from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.pictures import SequenceEmbeddings
from kernels import gpu_dispatch
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_vision import IMAGE, make_tiny_seeing

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

FIRST, LENGTH = 9, 16  # of the picture in the prompt


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_tokens_of_a_picture_read_one_another(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_seeing(tmp_path, family)
    words = random_tokens(3, 20, 190)
    prompt = [*words[:FIRST], *[IMAGE] * LENGTH, *words[FIRST:]]
    found = []
    for attention, where in ((TORCH, torch.device("cpu")), (TRITON, device)):
        if attention == TRITON:
            monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda _: True)
        decoder = tiny_decoder(tmp_path, device=where)
        embeddings = torch.randn(LENGTH, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
        shown = SequenceEmbeddings(np.arange(FIRST, FIRST + LENGTH), embeddings.to(where))
        probe = LogitsProbe(decoder, attention=attention)
        probe.add("a", prompt, pictures=shown, whole_runs=((FIRST, LENGTH),))
        probe.add("b", words)
        for counts in ({"a": 11, "b": 5}, {"a": 1}, {"a": 1, "b": 9}, {"a": len(prompt) - 13, "b": 1}):
            probe.step(**counts)
        found.append(probe.logits("a").cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=1e-4)
